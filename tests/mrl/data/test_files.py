"""Files of every kind are read to the same rows; a bad one is named with its line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mrl.data.files import read_rows
from mrl.errors import DataError

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": [{"role": "user", "content": "b"}], "answer": 2}]


def test_jsonl_gzip_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    nested = [
        {
            "prompt": [{"role": "user", "content": str(n)}],
            "answer": str(n),
            "reward_model": {"ground_truth": n},
        }
        for n in range(5)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(nested), tmp_path / "a.parquet")
    assert [row for _, row in read_rows(tmp_path / "a.jsonl")] == ROWS
    assert [row for _, row in read_rows(tmp_path / "a.jsonl.gz")] == ROWS
    assert list(read_rows(tmp_path / "a.parquet")) == [
        (f"{tmp_path}/a.parquet:{n + 1}", row) for n, row in enumerate(nested)
    ]


def test_lines_are_counted_from_one_and_empty_ones_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [place.rpartition(":")[2] for place, _ in read_rows(tmp_path / "a.jsonl")] == ["1", "3"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl:2: no JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl:2: .*list"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b'\xff\xfe{"a"', r"a\.jsonl:1: no JSON"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:-20], "cannot be read"),
        ("a.parquet", b"no parquet", "cannot be read as parquet"),
        ("a.csv", b"a,b", "unknown kind"),
        ("missing.jsonl", None, "no such file"),
    ],
)
def test_bad_files_are_named(name: str, content: Any, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        list(read_rows(tmp_path / name))
