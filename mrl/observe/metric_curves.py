"""A run's metrics: an array each, with a value a row; and curves of bounded length, of rows' mean and range."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mrl.observe.metric_names import with_todays_names

LARGEST_STEP = 2**53
POINTS = 1000
"""Most points of a curve."""
SECONDS = ("time/step_seconds", "time/save_seconds", "time/validate_seconds")
"""What a row's time is the sum of."""


class Curves:
    """Rows so far. A row of a step that was there replaces that one and those after it, as a resumed run does it."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps: array[int] = array("q")
        self._columns: dict[str, array[float]] = {}
        self.not_finite: dict[str, tuple[int, int]] = {}
        """Metric -> how many rows have NaN or infinity there, and the first step of those."""
        self.skipped = 0
        """Rows without a step."""
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """One row of metrics; one without a step is no row."""
        step = row.get("step")
        if not isinstance(step, int) or abs(step) >= LARGEST_STEP:
            self.skipped += 1
            return
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
        self._steps.append(step)
        for name, value in with_todays_names(row).items():
            number = _number(value)
            self._column(name, len(self._steps) - 1).append(math.nan if number is None else number)
            if number is not None and not math.isfinite(number):
                self._columns[name][-1] = math.nan
                count, first = self.not_finite.get(name, (0, step))
                self.not_finite[name] = (count + 1, first)

    def _column(self, name: str, size: int) -> array[float]:
        """The metric's values with as many entries; NaN where rows did not have it."""
        column = self._columns.setdefault(name, array("d"))
        del column[size:]
        column.extend([math.nan] * (size - len(column)))
        return column

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> np.ndarray:
        """[S] the steps of the rows, ascending."""
        return np.array(self._steps, np.int64)

    def of(self, name: str) -> np.ndarray:
        """[S] float64; NaN where a row has no finite number of this name."""
        if name not in self._columns:
            return np.full(len(self), math.nan)
        return np.array(self._column(name, len(self)), np.float64)

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.of(name)).any())

    def names(self, prefix: str = "") -> list[str]:
        """Metrics that begin so, in the order in which rows named them first."""
        return [name for name in self._columns if name.startswith(prefix)]


def rows_per_point(curves: Curves, points: int = POINTS) -> int:
    """Return how many neighbouring rows share a point, for at most so many points; a power of 2."""
    return 1 << max(0, math.ceil(math.log2(len(curves) / points))) if len(curves) else 1


def drawn(curves: Curves, points: int = POINTS) -> dict[str, Any]:
    """Return JSON values: steps and hours at the end of each point, and per metric the means; with more than
    one row a point also the ranges.

    `hours` are those that steps, their saving and validations took since the first row; None stands where a point has no number.
    """
    width, steps = rows_per_point(curves, points), curves.steps
    starts = np.arange(0, len(curves), width)
    last = np.minimum(starts + width, len(curves)) - 1
    seconds = np.cumsum(sum(np.nan_to_num(curves.of(name)) for name in SECONDS))
    return {
        "rows": len(curves),
        "rows_per_point": width,
        "first": steps[starts].tolist(),
        "step": steps[last].tolist(),
        "hours": [_short(value) for value in seconds[last] / 3600],
        "metrics": {
            name: _points(curves.of(name), starts, with_range=width > 1)
            for name in curves.names()
            if name != "step" and curves.has(name)
        },
        "not_finite": curves.not_finite,
    }


def _points(values: np.ndarray, starts: np.ndarray, *, with_range: bool) -> dict[str, list[float | None]]:
    """`values` [S] of a metric, in points that begin at these rows."""
    there = np.isfinite(values)
    count = np.add.reduceat(there, starts, dtype=np.int64)
    lines = {"mean": np.add.reduceat(np.where(there, values, 0.0), starts) / np.maximum(count, 1)}
    if with_range:
        lines["low"] = np.minimum.reduceat(np.where(there, values, np.inf), starts)
        lines["high"] = np.maximum.reduceat(np.where(there, values, -np.inf), starts)
    return {
        name: [_short(value) if n else None for value, n in zip(line, count, strict=True)]
        for name, line in lines.items()
    }


def _number(value: object) -> float | None:
    """NaN and infinity stand as texts in metrics.jsonl."""
    if isinstance(value, bool):
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return float(value) if isinstance(value, int | float | str | np.floating) else None
    return None


def _short(value: float) -> float:
    return float(f"{value:.6g}")
