"""Shares of a load over ranks, such that the busiest rank has as little as possible. Pure, in integers.

The same inputs give the same shares on every machine, so every rank computes them alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Ranks = tuple[int, ...]
"""Ranks that can each take any part of a load, in rising order."""

_SWEEPS = 200
_STILL = 2000
"""The shares are final once no rank's load changes by more than 1/_STILL of the largest load."""


def even_shares(loads: Mapping[Ranks, int]) -> dict[Ranks, np.ndarray]:
    """Split every group's load over its ranks.

    Each group in turn fills its least loaded ranks to one level, until nothing moves. That minimises the sum
    of squares of all ranks' loads, and so also the largest load. Groups with few ranks come first, which is
    already optimal if groups are nested or disjoint.

    Returns:
        By group, the load of each of its ranks.

    >>> {ranks: share.tolist() for ranks, share in even_shares({(0,): 6, (0, 1): 10}).items()}
    {(0,): [6], (0, 1): [2, 8]}
    """
    order = sorted(loads, key=lambda ranks: (len(ranks), ranks))
    indices = {ranks: np.array(ranks) for ranks in order}
    shares = {ranks: np.zeros(len(ranks), np.int64) for ranks in order}
    total = np.zeros(1 + max((ranks[-1] for ranks in order), default=0), np.int64)
    for _ in range(_SWEEPS):
        before = total.copy()
        for ranks in order:
            index = indices[ranks]
            total[index] -= shares[ranks]
            shares[ranks] = _filled(total[index], loads[ranks])
            total[index] += shares[ranks]
        if np.abs(total - before).max() * _STILL <= total.max():
            break
    return shares


def _filled(levels: np.ndarray, amount: int) -> np.ndarray:
    """Return what each rank gets of `amount` if the lowest levels are filled first.

    >>> _filled(np.array([5, 0, 2]), 6).tolist()
    [0, 4, 2]
    """
    order = np.argsort(levels, kind="stable")
    rising = levels[order]
    below = np.arange(len(rising)) * rising - (np.cumsum(rising) - rising)
    count = int(np.searchsorted(below, amount, side="right"))
    level, left = divmod(amount + int(rising[:count].sum()), count)
    result = np.zeros(len(levels), np.int64)
    result[order[:count]] = level - rising[:count]
    result[order[:left]] += 1
    return result


def cut(units: int, copies: int, shares: np.ndarray) -> np.ndarray:
    """Return the bounds, in units from 0, at which a row of `copies` copies changes its rank.

    >>> cut(10, 2, np.array([1, 3])).tolist()
    [0, 5, 20]
    """
    bounds = np.cumsum(shares, dtype=np.float64)
    return np.rint(np.concatenate([[0.0], bounds / bounds[-1] * (units * copies)])).astype(np.int64)
