"""All kinds of files give the same rows; a bad file is named with its line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mrl.data.row_files import read_rows
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


def test_a_list_of_rows_is_read_and_lines_under_the_same_ending_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\n" + json.dumps(ROWS, indent=1))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (tmp_path / "c.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("a.json", "b.json.gz", "c.json"):
        assert list(read_rows(tmp_path / name)) == [
            (f"{tmp_path / name}:{n}", row) for n, row in enumerate(ROWS, 1)
        ]


def test_cells_of_csv_are_text_and_empty_ones_null(tmp_path: Path) -> None:
    """A reader of types would make numbers of 007 and 1e3."""
    text = '\ufeffprompt,answer,tag\n"two\nlines, a ""comma""",007,\nb,1e3,easy\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert list(read_rows(tmp_path / "a.csv")) == [
        (f"{tmp_path}/a.csv:3", {"prompt": 'two\nlines, a "comma"', "answer": "007", "tag": None}),
        (f"{tmp_path}/a.csv:4", {"prompt": "b", "answer": "1e3", "tag": "easy"}),
    ]
    (tmp_path / "b.csv").write_text("prompt,answer\n" + "x" * 200_000 + ",1\n")
    assert len(next(read_rows(tmp_path / "b.csv"))[1]["prompt"]) == 200_000


def test_lines_are_counted_from_one_and_empty_ones_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [place.rpartition(":")[2] for place, _ in read_rows(tmp_path / "a.jsonl")] == ["1", "3"]


PACKED = gzip.compress(b"".join(b'{"a": %d}\n' % (n * 7919) for n in range(200)), mtime=0)
DAMAGED = PACKED[:40] + bytes([PACKED[40] ^ 255]) + PACKED[41:]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl:2: .*list"),
        ("a.jsonl", b"", "contains no rows"),
        ("a.jsonl", b'\xff\xfe{"a"', r"a\.jsonl:1: not valid JSON"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-20], "cannot be read"),
        ("a.parquet", b"no parquet", "cannot be read as parquet"),
        ("a.tsv", b"a\tb", r"unknown kind.*\.csv"),
        ("a.csv", b"a,b", "contains no rows"),
        ("a.csv", b"a,a\n1,2\n", "contains a column twice"),
        ("a.csv", b"a,b\n1,2\n3\n", r"a\.csv:3: .*header \(2\)"),
        ("a.csv", b"a,b\n1,2,3\n", r"a\.csv:2: .*header \(2\)"),
        ("a.csv", b'a,b\n1,"2\n', "cannot be read as csv"),
        ("a.csv", b"a,b\n1,\xff\n", "cannot be read as csv"),
        ("a.json", b'[{"a": 1}, 2]', r"a\.json:2: .*int"),
        ("a.json", b'[{"a": 1}', r"a\.json: not valid JSON"),
        ("a.json", b"[]", "contains no rows"),
        ("missing.jsonl", None, "no such file"),
        ("a.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "a.jsonl:2: not valid JSON: brackets are nested"),
        ("a.json", b'[{"a": ' + b"[" * 100_000, "a.json: not valid JSON: brackets are nested"),
        ("a.jsonl", b'{"a": 1, "b": {"c": 1, "c": 2}}\n', "a.jsonl:1: .* contains the key 'c' twice"),
        ("a.json", b'[{"a": 1, "a": 2}]', "a.json: .* contains the key 'a' twice"),
        ("a.jsonl.gz", DAMAGED, "a.jsonl.gz: cannot be read: "),
        ("a.csv", b"a,a," + b"x" * 70_000 + b"\n1,2,3\n", "contains a column twice"),
    ],
)
def test_bad_files_are_named(name: str, content: Any, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as error:
        list(read_rows(tmp_path / name))
    assert len(str(error.value)) < 1000


def test_a_page_of_parquet_is_held_against_its_checksum(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.parquet", [{"a": f"value {n:04d}"} for n in range(50)]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, compression="none", write_page_checksum=True
    )
    assert [row for _, row in read_rows(path)] == rows
    data = path.read_bytes()
    path.write_bytes(data.replace(b"value 0007", b"value 0008", 1))
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet: .*CRC"):
        list(read_rows(path))


def test_text_of_parquet_that_is_no_text_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": "plain text"}]), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"plain text", b"plain \xff\xfe\xff\xff"))
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet: .*utf-8"):
        list(read_rows(path))
