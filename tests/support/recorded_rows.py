"""Rows of metrics that real runs wrote, with the columns that rules read, rounded to five digits; tests/data/recorded_runs/README.md says of which."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parents[1] / "data/recorded_runs"


def recorded(name: str) -> list[dict[str, Any]]:
    """The rows of a run, the first its validation before training."""
    with gzip.open(RUNS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
