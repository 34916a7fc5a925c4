"""Rows of samples.jsonl as the table that trackers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""An object of samples.jsonl."""
COLUMNS = (
    "step",
    "sample_id",
    "domain",
    "prompt",
    "response",
    "ground_truth",
    "reward",
    "verdict",
    "reason",
    "status",
    "response_tokens",
)


def samples_table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Names of the columns, and the rows' values in their order; None where a row has none."""
    return list(COLUMNS), [[row.get(name) for name in COLUMNS] for row in rows]
