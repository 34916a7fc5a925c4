"""Agreement of verdicts with known labels. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959964
"""Normal quantile of a two-sided 95 % interval."""


def wilson(count: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of the share count / total (Wilson, 1927); (0, 1) if total is 0.

    >>> tuple(round(bound, 3) for bound in wilson(5, 50))
    (0.043, 0.214)
    """
    if not total:
        return 0.0, 1.0
    share, spread = count / total, Z * Z / total
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def auroc(values: Sequence[float], right: Sequence[bool]) -> float | None:
    """Return the probability that a correct response scores above an incorrect one; ties count half.

    Returns None if `right` has only one of the two labels.

    >>> auroc([0.9, 0.5, 0.5, 0.1], [True, True, False, False])
    0.875
    """
    a, b = np.array(values, float), np.array(right, bool)
    high, low = a[b], a[~b]
    if not len(high) or not len(low):
        return None
    return float(np.mean((high[:, None] > low[None]) + 0.5 * (high[:, None] == low[None])))
