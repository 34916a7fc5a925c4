"""A run's metrics as one array a metric, a value a row, and what rules ask of such arrays.

All of it looks back only: an entry of a result depends on rows up to its own, so that a rule says the same of a step while
the run goes on and long after it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mrl.observe.metric_names import with_todays_names

START = 5
"""Rows with a value that make a metric's start."""
RECENT = 5
"""Rows that make its recent mean."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""As mrl.report.log_rows reads them."""
CERTAIN = 2.0
"""Standard errors beyond which a difference is one."""


class Curves:
    """Rows so far. A row of a step that was there replaces that one and those after it, as a resumed run does it."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps: array[int] = array("q")
        self._columns: dict[str, array[float]] = {}
        self.not_finite: dict[str, tuple[int, int]] = {}
        """Metric -> how many rows have NaN or infinity there, and the first step of those."""
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """One row of metrics; one without a step is no row."""
        if not isinstance(row.get("step"), int):
            return
        while self._steps and self._steps[-1] >= row["step"]:
            self._steps.pop()
        self._steps.append(row["step"])
        for name, value in with_todays_names(row).items():
            number = _number(value)
            self._column(name, len(self._steps) - 1).append(number)
            if math.isnan(number) and value in NOT_FINITE:
                count, first = self.not_finite.get(name, (0, row["step"]))
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

    def names(self, prefix: str) -> list[str]:
        """Metrics that begin so, in the order in which rows named them first."""
        return [name for name in self._columns if name.startswith(prefix)]


def initial_value(values: np.ndarray) -> float:
    """The median of the first START values."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite[:START])) if len(finite) else math.nan


def forward_fill(values: np.ndarray) -> np.ndarray:
    """[S] each entry, or the last finite one before it."""
    places = np.where(np.isfinite(values), np.arange(len(values)), -1)
    last = np.maximum.accumulate(places)
    return np.where(last >= 0, values[last], math.nan)


def recent(values: np.ndarray, rows: int = RECENT) -> np.ndarray:
    """[S] the mean of the finite entries among the last `rows`, its own included; NaN where there are none."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[rows:], counts[rows:] = sums[rows:] - sums[:-rows], counts[rows:] - counts[:-rows]
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)


def noise(values: np.ndarray) -> float:
    """The standard deviation of one value around its curve: of neighbours' differences, over sqrt 2, by their median."""
    differences = np.abs(np.diff(values[np.isfinite(values)]))
    return float(np.median(differences)) / 0.6745 / math.sqrt(2) if len(differences) else 0.0


def standing(mask: np.ndarray) -> int | None:
    """Where the run of True that reaches the last row begins; None where the last row is False."""
    if not len(mask) or not mask[-1]:
        return None
    false = np.flatnonzero(~mask)
    return int(false[-1]) + 1 if len(false) else 0


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan
