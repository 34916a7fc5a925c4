"""What rules ask of a metric's values, an array with an entry for each row.

All of it looks back only: an entry of a result depends on rows up to its own, so that a rule says the same of a step while
the run goes on and long after it.
"""

from __future__ import annotations

import math

import numpy as np

START = 5
"""Rows with a value that make a metric's start."""
RECENT = 5
"""Rows that make its recent mean."""
CERTAIN = 2.0
"""Standard errors beyond which a difference is one."""


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
