"""Small files that unpack to more than memory, and endless templates: a one-line error, within bounds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mrl.agents.render import TurnRenderer
from mrl.config.sections.data import DataSection
from mrl.data import row_files, templates
from mrl.data.conversation import Encoder
from mrl.data.load_rows import load_data
from mrl.data.messages import read_messages
from mrl.data.row_files import read_rows
from mrl.errors import MrlError
from mrl.rewards.kinds.reward_section import RewardSection
from tests.support.bad_files import outcome

MIB = 2**20


def _gzipped(path: Path, head: str, filler: str, tail: str, mebibytes: int) -> Path:
    part = (filler * (MIB // len(filler))).encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head.encode())
        for _ in range(mebibytes):
            file.write(part)
        file.write(tail.encode())
    return path


@pytest.mark.parametrize("ending", [".jsonl.gz", ".json.gz"])
def test_a_line_without_an_end(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 MB of gzip may be a line of 3 GB."""
    monkeypatch.setattr(row_files, "ROW_BYTES", MIB)
    path = _gzipped(tmp_path / f"rows{ending}", '{"answer": "1", "prompt": "', "x", '"}\n', 3)
    _, message = outcome(lambda: list(read_rows(path)))
    assert message.startswith(f"{path}:1: the line is longer than 1,048,576 bytes")


def test_a_list_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "LIST_BYTES", 8 * MIB)
    path = _gzipped(tmp_path / "rows.json.gz", "[", '{"prompt": "1"},', "{}]", 9)
    _, message = outcome(lambda: list(read_rows(path)))
    assert message.startswith(f"{path}: the list exceeds") and ".jsonl" in message


def test_a_csv_field_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "ROW_BYTES", MIB)
    path = tmp_path / "rows.csv"
    path.write_text(f'prompt,answer\n1,2\n"{"x" * 2 * MIB}",1\n')
    _, message = outcome(lambda: list(read_rows(path)))
    assert message.startswith(f"{path}:3: the line is longer than 1,048,576 bytes")


def _parquet(path: Path, **options: Any) -> Path:
    columns = options.pop("columns")
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd", **options)
    return path


def test_a_small_parquet_of_very_many_values(tmp_path: Path) -> None:
    """A kilobyte with one row: a list of three million equal numbers."""
    count = 3_000_000
    values = pyarrow.array(np.zeros(count, np.int8))
    columns = {"prompt": ["a"], "answer": ["1"], "x": pyarrow.LargeListArray.from_arrays([0, count], values)}
    path = _parquet(tmp_path / "rows.parquet", columns=columns)
    del values, columns
    assert path.stat().st_size < 3000
    _, message = outcome(lambda: list(read_rows(path)))
    assert message.startswith(f"{path}: column 'x.list.element' has 3,000,000 values in 1 rows")


def test_a_small_parquet_of_a_very_long_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "UNPACKED_BYTES", 16 * MIB)
    columns = {"prompt": ["x" * 32 * MIB], "answer": ["1"]}
    path = _parquet(tmp_path / "rows.parquet", columns=columns, use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 20_000
    _, message = outcome(lambda: list(read_rows(path)))
    assert message.startswith(f"{path}: column 'prompt' has ") and "bytes that unpack to" in message


def test_a_small_parquet_of_a_long_text_again_and_again(tmp_path, monkeypatch) -> None:
    """Once in the file's dictionary, a thousand times in the rows."""
    monkeypatch.setattr(row_files, "BATCH_BYTES", 32 * MIB)
    columns = {"prompt": ["x" * MIB] * 64, "answer": ["1"] * 64}
    path = _parquet(tmp_path / "rows.parquet", columns=columns, dictionary_pagesize_limit=4 * MIB)
    _, message = outcome(lambda: list(read_rows(path)))
    assert message.startswith(f"{path}:1: this row and the next 63 unpack to ")


ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_a_template_without_an_end(chat_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    monkeypatch.setattr(chat_tokenizer, "chat_template", ENDLESS)
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"role": "user", "content": str(n)}], "answer": "2"} for n in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=str(path), unusable="filter")
    talk = read_messages(
        [{"role": role, "content": "1"} for role in ("user", "assistant")], name="m", place="r:1"
    )
    for call in (
        lambda: load_data(section, RewardSection(kind="maths"), chat_tokenizer),
        lambda: Encoder(chat_tokenizer, ends=[2]).messages(talk, first=1, place="r:1"),
        lambda: TurnRenderer(chat_tokenizer),
    ):
        with pytest.raises(MrlError, match=r"takes more than 0.3 s .*data.chat_template=false"):
            call()
