"""Rows of GSM8K and HumanEval: the shipped ones in tests/data, or the whole sets in MRL_DATA."""

import os
from pathlib import Path
from typing import Any

from mrl.data.row_files import read_rows

WHOLE = "MRL_DATA" in os.environ
FOLDER = Path(os.environ.get("MRL_DATA", Path(__file__).parent / "data"))
"""Folder with gsm8k/train.jsonl, gsm8k/test.jsonl and human_eval/HumanEval.jsonl (or .jsonl.gz)."""
NAMES = ("gsm8k", "human_eval")


def files(name: str) -> list[Path]:
    return sorted((FOLDER / name).glob("*.jsonl*"))


def rows(name: str) -> list[dict[str, Any]]:
    return [row for path in files(name) for _, row in read_rows(path)]


def summary() -> str:
    counted = ", ".join(f"{len(rows(name))} of {name}" for name in NAMES)
    return f"rows of data sets: {counted}" + ("" if WHOLE else "; MRL_DATA=FOLDER reads the whole sets")
