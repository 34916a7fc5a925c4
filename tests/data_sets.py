"""Rows of GSM8K and HumanEval: those that are shipped in tests/data, or the whole sets where MRL_DATA points."""

import os
from pathlib import Path
from typing import Any

from mrl.data.row_files import read_rows

WHOLE = "MRL_DATA" in os.environ
FOLDER = Path(os.environ.get("MRL_DATA", Path(__file__).parent / "data"))
"""Folder with gsm8k/train.jsonl, gsm8k/test.jsonl and human_eval/HumanEval.jsonl (or .jsonl.gz)."""
NAMES = ("gsm8k", "human_eval")


def files(name: str) -> list[Path]:
    """The files of a data set."""
    return sorted((FOLDER / name).glob("*.jsonl*"))


def rows(name: str) -> list[dict[str, Any]]:
    """All rows of a data set."""
    return [row for path in files(name) for _, row in read_rows(path)]


def summary() -> str:
    """One line that says how many rows there are for tests."""
    counted = ", ".join(f"{len(rows(name))} of {name}" for name in NAMES)
    return f"rows of data sets: {counted}" + ("" if WHOLE else "; MRL_DATA=FOLDER reads the whole sets")
