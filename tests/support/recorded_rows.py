"""Metrics of the real runs in tests/data/recorded_runs/README.md, rounded to five digits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parents[1] / "data/recorded_runs"


def recorded(name: str) -> list[dict[str, Any]]:
    """Return a run's rows, beginning with its validation before training."""
    with gzip.open(RUNS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
