"""Whether something grows while a run goes on: slopes over steps within its lives, and from life to life."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

WARM_STEPS = 500
"""Of a life, in which allocators and caches fill: no slope within it is taken of these."""
SAME_AGE_STEPS = 50
"""The age at which lives are compared with each other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slope:
    """How one figure moved."""

    name: str
    first: float
    last: float
    """The values at SAME_AGE_STEPS of the first life and at the end of the last one."""
    within: float | None
    """Per 1,000 steps of the same life; None where no life has two points behind WARM_STEPS."""
    across: float
    """Per life, of values at the same age."""
    bound: float
    """What `within` and `across` may be at most to be called flat."""

    @property
    def flat(self) -> bool:
        return max(self.within or 0.0, self.across) <= self.bound


def slope(name: str, lives: Sequence[Sequence[tuple[float, float]]], bound: float) -> Slope | None:
    """Of points (step, value), life by life, each from its first step on; None where no life has a point behind SAME_AGE_STEPS."""
    old = [each for each in (_behind(life, SAME_AGE_STEPS) for life in lives) if each]
    warm = [each for each in (_behind(life, WARM_STEPS) for life in lives) if len(each) > 1]
    if not old:
        return None
    ages = [(float(number), life[0][1]) for number, life in enumerate(old)]
    within = 1000 * fitted(warm) if warm else None
    return Slope(name, old[0][0][1], old[-1][-1][1], within, fitted([ages]), bound)


def _behind(life: Sequence[tuple[float, float]], steps: int) -> list[tuple[float, float]]:
    return [point for point in life if point[0] >= life[0][0] + steps]


def fitted(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The least-squares slope that all groups of points (x, y) have in common, each with a height of its own; 0 where x never moves.

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
    """Of rows with "life", "step" and figures; of each life without its last step, in which it ends. `bounds`: by a figure's name, or by its beginning
    before a slash, what it may grow by: the larger of a number and a part of its median."""
    lives = [_until_last_step([row for row in samples if row["life"] == n]) for n in _lives(samples)]
    names = sorted({name for life in lives for row in life for name in row if "/" in name})
    found = []
    for name in names:
        points = [[(row["step"], row[name]) for row in life if name in row] for life in lives]
        least, part = bounds.get(name) or bounds[name.partition("/")[0]]
        middle = statistics.median(value for life in points for _, value in life)
        found.append(slope(name, points, max(least, part * middle)))
    return [each for each in found if each is not None]


def _lives(samples: Sequence[Mapping[str, float]]) -> list[float]:
    return sorted({row["life"] for row in samples})


def _until_last_step(life: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    last = max(row["step"] for row in life)
    return [row for row in life if row["step"] < last]
