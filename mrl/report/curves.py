"""metrics.jsonl as curves of bounded length: with more rows than fit, neighbours share a point with their mean and range."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from mrl.observe.metric_names import with_todays_names

LARGEST_STEP = 2**53
POINTS = 1000
"""Most points of a curve; a file of more rows has between half as many and all."""
OUTSIDE_STEP = ("time/save_seconds", "time/validate_seconds")
"""What takes time beside time/step_seconds."""


class DownsampledCurves:
    """Takes the rows of one run in order; memory depends on the number of metrics, not on that of rows."""

    def __init__(self, points: int = POINTS) -> None:
        """`points`: an even number."""
        self._points, self._width, self._used = points, 1, 0
        self._before = -LARGEST_STEP
        self.rows, self.skipped = 0, 0
        """Rows that were taken; rows without a step, or with one that was there before."""
        self._first, self._last = np.zeros(points, np.int64), np.zeros(points, np.int64)
        self._seconds = np.zeros(points)
        self._columns: dict[str, np.ndarray] = {}
        self.not_finite: dict[str, list[int]] = {}
        """Name -> [how many rows have no finite number there, the first step of those]."""

    def add(self, row: dict[str, Any]) -> None:
        """One row. Values that are no numbers are left out; NaN and infinity are counted."""
        step = row.get("step")
        if not isinstance(step, int) or not self._before <= step < LARGEST_STEP:
            self.skipped += 1
            return
        place, self._before = self._place(step), step + 1
        numbers = {name: _number(value) for name, value in with_todays_names(row).items() if name != "step"}
        for name, value in numbers.items():
            if value is not None:
                self._put(name, place, value, step)
        taken = [numbers.get(name) for name in ("time/step_seconds", *OUTSIDE_STEP)]
        self._seconds[place] += sum(value for value in taken if value is not None and math.isfinite(value))

    @property
    def rows_per_point(self) -> int:
        """How many neighbouring rows share a point."""
        return self._width

    def tree(self) -> dict[str, Any]:
        """JSON values: steps and hours at the end of each point, and per metric the means; with more than one row a point also the ranges.

        `hours` are those that steps, their saving and validations took since the first row; None stands where a point has no number.
        """
        used = slice(0, self._used)
        metrics = {name: self._metric(column[:, used]) for name, column in self._columns.items()}
        return {
            "rows": self.rows,
            "rows_per_point": self._width,
            "first": self._first[used].tolist(),
            "step": self._last[used].tolist(),
            "hours": [_short(value) for value in np.cumsum(self._seconds[used]) / 3600],
            "metrics": metrics,
            "not_finite": self.not_finite,
        }

    def _place(self, step: int) -> int:
        """Where the next row goes."""
        if self.rows == self._points * self._width:
            self._halve()
        place = self.rows // self._width
        if self.rows % self._width == 0:
            self._first[place], self._used = step, place + 1
        self._last[place] = step
        self.rows += 1
        return place

    def _put(self, name: str, place: int, value: float, step: int) -> None:
        if not math.isfinite(value):
            self.not_finite.setdefault(name, [0, step])[0] += 1
            return
        if name not in self._columns:
            self._columns[name] = _empty(self._points)
        column = self._columns[name]
        column[0, place] += 1
        column[1, place] += value
        column[2, place] = min(column[2, place], value)
        column[3, place] = max(column[3, place], value)

    def _halve(self) -> None:
        """Two neighbours become one point."""
        half = self._points // 2
        self._first[:half], self._last[:half] = self._first[0::2].copy(), self._last[1::2].copy()
        seconds = self._seconds[0::2] + self._seconds[1::2]
        self._seconds[:half], self._seconds[half:] = seconds, 0
        for name, column in self._columns.items():
            joined = _empty(self._points)
            joined[:2, :half] = column[:2, 0::2] + column[:2, 1::2]
            joined[2, :half] = np.minimum(column[2, 0::2], column[2, 1::2])
            joined[3, :half] = np.maximum(column[3, 0::2], column[3, 1::2])
            self._columns[name] = joined
        self._width *= 2

    def _metric(self, column: np.ndarray) -> dict[str, list[float | None]]:
        """`column` [4, points]: numbers, their sum, the smallest and the largest."""
        count, total, low, high = column
        lines = {"mean": total / np.maximum(count, 1)}
        if self._width > 1:
            lines |= {"low": low, "high": high}
        return {
            name: [_short(value) if n else None for value, n in zip(line, count, strict=True)]
            for name, line in lines.items()
        }


def _empty(points: int) -> np.ndarray:
    return np.repeat([[0.0], [0.0], [np.inf], [-np.inf]], points, axis=1)


def _number(value: object) -> float | None:
    """NaN and infinity stand as texts in metrics.jsonl."""
    if isinstance(value, bool):
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return float(value) if isinstance(value, int | float | str) else None
    return None


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
