"""Collect a run's metrics as arrays, one value per row, and reduce them to curves of bounded length."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mrl.observe.metric_names import with_current_names

LARGEST_STEP = 2**53
POINTS = 1000
"""Most points of a curve."""
SECONDS = ("time/step_seconds", "time/save_seconds", "time/validate_seconds")
"""Metrics whose sum is a row's time."""


class Curves:
    """Rows so far; a row of an existing step replaces that row and all after it, as a resumed run does."""

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
        """Add one row of metrics; a row without a step is only counted."""
        step = row.get("step")
        if not isinstance(step, int) or abs(step) >= LARGEST_STEP:
            self.skipped += 1
            return
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
        self._steps.append(step)
        for name, value in with_current_names(row).items():
            number = _number(value)
            self._column(name, len(self._steps) - 1).append(math.nan if number is None else number)
            if number is not None and not math.isfinite(number):
                self._columns[name][-1] = math.nan
                count, first = self.not_finite.get(name, (0, step))
                self.not_finite[name] = (count + 1, first)

    def _column(self, name: str, size: int) -> array[float]:
        """Return the metric's values cut or padded to `size`; NaN for rows without it."""
        column = self._columns.setdefault(name, array("d"))
        del column[size:]
        column.extend([math.nan] * (size - len(column)))
        return column

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> np.ndarray:
        """[S] steps of the rows, ascending."""
        return np.array(self._steps, np.int64)

    def values(self, name: str) -> np.ndarray:
        """Return [S] float64; NaN if a row has no finite number of this name."""
        if name not in self._columns:
            return np.full(len(self), math.nan)
        return np.array(self._column(name, len(self)), np.float64)

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.values(name)).any())

    def names(self, prefix: str = "") -> list[str]:
        """Return the metrics with this prefix, in order of first appearance."""
        return [name for name in self._columns if name.startswith(prefix)]


def rows_per_point(curves: Curves, points: int = POINTS) -> int:
    """Return how many neighbouring rows share a point, a power of 2, for at most `points` points."""
    return 1 << max(0, math.ceil(math.log2(len(curves) / points))) if len(curves) else 1


def curve_points(curves: Curves, points: int = POINTS) -> dict[str, Any]:
    """Return JSON values: step and hours at the end of each point, each metric's means, and ranges if points
    have several rows.

    `hours` count steps, saves and validations since the first row; None marks a point without a number.
    """
    width, steps = rows_per_point(curves, points), curves.steps
    starts = np.arange(0, len(curves), width)
    last = np.minimum(starts + width, len(curves)) - 1
    seconds = np.cumsum(sum(np.nan_to_num(curves.values(name)) for name in SECONDS))
    return {
        "rows": len(curves),
        "rows_per_point": width,
        "first": steps[starts].tolist(),
        "step": steps[last].tolist(),
        "hours": [_short(value) for value in seconds[last] / 3600],
        "metrics": {
            name: _points(curves.values(name), starts, with_range=width > 1)
            for name in curves.names()
            if name != "step" and curves.has(name)
        },
        "not_finite": curves.not_finite,
    }


def _points(values: np.ndarray, starts: np.ndarray, *, with_range: bool) -> dict[str, list[float | None]]:
    """Return means and ranges of a metric's `values` [S] in points that begin at the rows `starts`."""
    is_finite = np.isfinite(values)
    count = np.add.reduceat(is_finite, starts, dtype=np.int64)
    lines = {"mean": np.add.reduceat(np.where(is_finite, values, 0.0), starts) / np.maximum(count, 1)}
    if with_range:
        lines["low"] = np.minimum.reduceat(np.where(is_finite, values, np.inf), starts)
        lines["high"] = np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts)
    return {
        name: [_short(value) if n else None for value, n in zip(line, count, strict=True)]
        for name, line in lines.items()
    }


def _number(value: object) -> float | None:
    """Return a number or None; metrics.jsonl has NaN and infinity as text."""
    if isinstance(value, bool):
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return float(value) if isinstance(value, int | float | str | np.floating) else None
    return None


def _short(value: float) -> float:
    return float(f"{value:.6g}")
