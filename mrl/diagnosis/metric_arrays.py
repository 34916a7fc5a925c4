"""Statistics of a metric's values, an array with one entry per row.

A result's entry depends only on rows up to its own, so a rule gives the same verdict on a step during the run
and long after.
"""

from __future__ import annotations

import math

import numpy as np

START = 5
"""Rows with a value that define a metric's start."""
RECENT = 5
"""Rows of its recent mean."""
CERTAIN = 2.0
"""Standard errors above which a difference counts."""


def initial_value(values: np.ndarray) -> float:
    """Return the median of the first START values."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite[:START])) if len(finite) else math.nan


def forward_fill(values: np.ndarray) -> np.ndarray:
    """Return [S] each entry, or the last finite one before it."""
    places = np.where(np.isfinite(values), np.arange(len(values)), -1)
    last = np.maximum.accumulate(places)
    return np.where(last >= 0, values[last], math.nan)


def recent(values: np.ndarray, rows: int = RECENT) -> np.ndarray:
    """Return [S] means of the finite entries among the last `rows`, the row's own included; NaN if none."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[rows:], counts[rows:] = sums[rows:] - sums[:-rows], counts[rows:] - counts[:-rows]
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)


def noise(values: np.ndarray) -> float:
    """Return the standard deviation of a value around its curve, from the median difference of neighbours."""
    differences = np.abs(np.diff(values[np.isfinite(values)]))
    return float(np.median(differences)) / 0.6745 / math.sqrt(2) if len(differences) else 0.0


def standing(mask: np.ndarray) -> int | None:
    """Return the start of the run of True that reaches the last row; None if the last row is False."""
    if not len(mask) or not mask[-1]:
        return None
    false = np.flatnonzero(~mask)
    return int(false[-1]) + 1 if len(false) else 0
