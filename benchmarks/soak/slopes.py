"""Detect growth during a run: slopes over steps within its lives, and from life to life."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

WARM_STEPS = 500
"""First steps of a life, in which allocators and caches fill; excluded from slopes within lives."""
SAME_AGE_STEPS = 50
"""Steps of a life after which lives are compared with each other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slope:
    """Growth of one figure."""

    name: str
    first: float
    last: float
    """Values after SAME_AGE_STEPS of the first life and at the end of the last one."""
    within: float | None
    """Growth per 1,000 steps of a life; None if no life has two points after WARM_STEPS."""
    across: float
    """Growth per life, after equally many steps."""
    bound: float
    """Largest `within` and `across` that count as flat."""

    @property
    def flat(self) -> bool:
        return max(self.within or 0.0, self.across) <= self.bound


def slope(name: str, lives: Sequence[Sequence[tuple[float, float]]], bound: float) -> Slope | None:
    """Return the slope of each life's points (step, value); None without a point after SAME_AGE_STEPS."""
    old = [points for points in (_behind(life, SAME_AGE_STEPS) for life in lives) if points]
    warm = [points for points in (_behind(life, WARM_STEPS) for life in lives) if len(points) > 1]
    if not old:
        return None
    ages = [(float(number), life[0][1]) for number, life in enumerate(old)]
    within = 1000 * fitted(warm) if warm else None
    return Slope(name, old[0][0][1], old[-1][-1][1], within, fitted([ages]), bound)


def _behind(life: Sequence[tuple[float, float]], steps: int) -> list[tuple[float, float]]:
    return [point for point in life if point[0] >= life[0][0] + steps]


def fitted(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the least-squares slope of groups of points (x, y) with separate offsets; 0 if x is constant.

    >>> fitted([[(0, 0), (1, 2)], [(0, 10), (2, 14)]])
    2.0
    """
    squares = products = 0.0
    for points in groups:
        middle_x, middle_y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
        squares += sum((x - middle_x) ** 2 for x, _ in points)
        products += sum((x - middle_x) * (y - middle_y) for x, y in points)
    return products / squares if squares else 0.0


def slopes(samples: Sequence[Mapping[str, float]], bounds: Mapping[str, tuple[float, float]]) -> list[Slope]:
    """Return the slopes of figures in rows with "life" and "step", without each life's last step.

    `bounds`: by a figure's name, or that before a slash: (number, share of the median); the larger counts."""
    lives = [_until_last_step([row for row in samples if row["life"] == n]) for n in _lives(samples)]
    names = sorted({name for life in lives for row in life for name in row if "/" in name})
    results = []
    for name in names:
        points = [[(row["step"], row[name]) for row in life if name in row] for life in lives]
        least, part = bounds.get(name) or bounds[name.partition("/")[0]]
        middle = statistics.median(value for life in points for _, value in life)
        results.append(slope(name, points, max(least, part * middle)))
    return [result for result in results if result is not None]


def _lives(samples: Sequence[Mapping[str, float]]) -> list[float]:
    return sorted({row["life"] for row in samples})


def _until_last_step(life: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    last = max(row["step"] for row in life)
    return [row for row in life if row["step"] < last]
