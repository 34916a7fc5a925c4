"""Files of rows damaged by seeds: each readable row is loaded or counted, or the file is refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.sections.data import DataSection
from mrl.config.sections.tune import TuneSection
from mrl.data.conversation import Encoder
from mrl.data.difficulty import read_rates
from mrl.data.load_rows import Dataset, load_data
from mrl.data.row_files import read_rows
from mrl.data.tune_rows import load_training
from mrl.rewards.kinds.reward_section import RewardSection
from tests.support.bad_files import failures, outcome
from tests.support.formats import PROMPTS, rows_of
from tests.support.mutations import Mutator, copied

CASES = 300
MATHS = RewardSection(kind="maths")


def written(rows: list[dict[str, Any]], path: Path) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, write_page_checksum=True)
    elif path.suffix == ".csv":
        names = list(rows[0])
        lines = [names, *([json.dumps(row[name]) for name in names] for row in rows)]
        path.write_text(
            "".join(
                ",".join(f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in line) + "\n" for line in lines
            )
        )
    else:
        path.write_text(text)
    return path


FORMS = {".jsonl": "lines", ".jsonl.gz": "bytes", ".json": "json", ".parquet": "bytes", ".csv": "csv"}


class Cases:
    def __init__(self, tokenizer: Any, saved: Path) -> None:
        self._tokenizer, self._saved = tokenizer, saved

    def __call__(self, mutator: Mutator, folder: Path) -> None:
        kind = mutator.choose(["rows", "rows", "rows", "rows", "tune", "tune", "rates", "saved"])
        {"rows": self.rows, "tune": self.tune, "rates": self.rates, "saved": self.saved}[kind](
            mutator, folder
        )

    def rows(self, mutator: Mutator, folder: Path) -> None:
        shape, ending = mutator.choose([*PROMPTS]), mutator.choose([*FORMS])
        path = written(rows_of(shape), folder / f"rows{ending}")
        good = path.read_bytes()
        mutator.told += [shape, ending]
        mutator.spoil(path, FORMS[ending])
        section = DataSection(train=str(path), unusable="filter", max_prompt_tokens=400, overlong="filter")
        data, message = outcome(lambda: load_data(section, MATHS, self._tokenizer))
        if data is None:
            assert path.name in message, message
            return
        if ending == ".jsonl":
            require_lines(path, good)
        require_counted(data, path)

    def tune(self, mutator: Mutator, folder: Path) -> None:
        shape, ending = mutator.choose(["pairs", "tune", "messages"]), mutator.choose([".jsonl", ".parquet"])
        path = written(rows_of(shape), folder / f"rows{ending}")
        mutator.told += [shape, ending]
        mutator.spoil(path, FORMS[ending])
        objective = {"name": "reward_model" if shape == "pairs" else "sft"}
        section = TuneSection.model_validate(
            {"data": {"train": str(path)}, "output": "out", "objective": objective}
        )
        encoder = Encoder(self._tokenizer, ends=[2])
        data, message = outcome(lambda: load_training(section, encoder, max_length=100_000))
        if data is None:
            assert path.name in message, message
        else:
            assert len(data.rows) == len(list(read_rows(path)))

    def rates(self, mutator: Mutator, folder: Path) -> None:
        path = folder / "rates.jsonl"
        lines = [{"id": f"i{n}", "samples": 4, "solved": n} for n in range(4)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        mutator.spoil(path, "lines")
        rates, message = outcome(lambda: read_rates(path))
        assert rates is not None or path.name in message, message

    def saved(self, mutator: Mutator, folder: Path) -> None:
        path = copied(self._saved, folder / "saved")
        file = mutator.choose(sorted(path.iterdir()))
        mutator.told.append(file.name)
        mutator.spoil(file, "json" if file.suffix == ".json" else "bytes")
        rows, message = outcome(lambda: list(read_rows(f"hf://{path}@train")))
        assert rows is not None or str(path) in message, message


def require_lines(path: Path, good: bytes) -> None:
    """Check that each unchanged line is a row with its number; only blank lines are skipped."""
    lines = path.read_bytes().split(b"\n")
    as_they_were = set(good.splitlines())
    rows = {int(place.rpartition(":")[2]): row for place, row in read_rows(path)}
    assert sorted(rows) == [n for n, line in enumerate(lines, 1) if line.strip()]
    for number, line in enumerate(lines, 1):
        assert line not in as_they_were or rows[number] == json.loads(line), number


def require_counted(data: Dataset, path: Path) -> None:
    report = data.report
    left_out = report.unusable + report.duplicates + report.overlong
    assert report.rows + left_out == len(list(read_rows(path)))


@pytest.fixture
def cases(tool_tokenizer: Any, tmp_path: Path) -> Cases:
    import datasets

    datasets.disable_progress_bars()
    saved = tmp_path / "good"
    datasets.Dataset.from_list(rows_of("chat"), split="train").save_to_disk(str(saved))
    return Cases(tool_tokenizer, saved)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_malformed_files_of_rows(every: int, cases: Cases, tmp_path: Path) -> None:
    failed = failures("data", range(0, CASES, every), cases, tmp_path)
    assert not failed, failed
