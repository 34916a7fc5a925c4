"""Demonstrations are read from files of every kind that data may come in; a bad row is named by file and line."""

import gzip
from pathlib import Path

import pytest

from mrl.errors import DataError
from mrl.launch.commands.sft import demonstrations


def test_prompts_and_responses_come_from_any_kind_of_file(tmp_path: Path) -> None:
    row = '{"prompt": "1+2=", "response": 3}\n'
    (tmp_path / "a.jsonl").write_text(row)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(row.encode()))
    (tmp_path / "c.csv").write_text("prompt,response\n1+2=,3\n")
    for name in ("a.jsonl", "b.jsonl.gz", "c.csv"):
        assert demonstrations(str(tmp_path / name)) == [("1+2=", "3")]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n', r"rows\.jsonl:2: .* no 'response'"),
        ("[1, 2]\n", r"rows\.jsonl:1: a row is an object"),
        ("", r"rows\.jsonl: holds no rows"),
    ],
)
def test_a_bad_row_is_named(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=named):
        demonstrations(str(tmp_path / "rows.jsonl"))
