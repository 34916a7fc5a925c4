"""How often a policy solves a prompt, told from few samples: the posterior of a rate, and when enough is known. Pure.

The prior is Jeffreys', Beta(1/2, 1/2); after k right responses of n the posterior is Beta(k + 1/2, n - k + 1/2). With the rate
p = sin(t)^2 its density over the angle t is sin(t)^(2k) cos(t)^(2 (n - k)), without the poles that p has at 0 and 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np

Place = Literal["below", "inside", "above", "unknown"]
"""Where a rate lies, seen from a band."""

_ANGLES = np.linspace(0.0, np.pi / 2, 4097)


@dataclasses.dataclass(frozen=True, slots=True)
class SolveRate:
    """What `samples` responses to one prompt say, of which `solved` were right."""

    samples: int
    solved: int

    @property
    def mean(self) -> float:
        """Of the posterior.

        >>> SolveRate(samples=3, solved=0).mean
        0.125
        """
        return (self.solved + 0.5) / (self.samples + 1)

    def below(self, rate: float) -> float:
        """The probability that the true rate is smaller.

        >>> round(SolveRate(samples=8, solved=4).below(0.5), 6)
        0.5
        """
        angle = math.asin(math.sqrt(rate))
        return float(np.interp(angle, _ANGLES, _distribution(self.samples, self.solved)))

    def interval(self, share: float) -> tuple[float, float]:
        """The central interval that holds the rate with this probability."""
        ends = np.array([1 - share, 1 + share]) / 2
        low, high = np.interp(ends, _distribution(self.samples, self.solved), _ANGLES)
        return float(np.sin(low) ** 2), float(np.sin(high) ** 2)

    def with_gradient(self, group: int) -> float:
        """The probability that a group of this size has right and wrong responses: the mean of 1 - p^G - (1 - p)^G.

        >>> round(SolveRate(samples=0, solved=0).with_gradient(2), 6)
        0.25
        """
        right, wrong = self.solved + 0.5, self.samples - self.solved + 0.5
        return 1.0 - _power_mean(right, wrong, group) - _power_mean(wrong, right, group)


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """Rates worth training on, and how sure one has to be of where a rate lies."""

    low: float
    high: float
    confidence: float
    """Least probability; more than 1/2, so that one place at most has it."""

    def place(self, rate: SolveRate) -> Place:
        """Where the rate lies, once one place has the probability."""
        below, above = rate.below(self.low), 1.0 - rate.below(self.high)
        places: dict[Place, float] = {"below": below, "above": above, "inside": 1.0 - below - above}
        sure: list[Place] = [name for name, p in places.items() if p > self.confidence]
        return sure[0] if sure else "unknown"


@functools.lru_cache(maxsize=1024)
def _distribution(samples: int, solved: int) -> np.ndarray:
    """[A] the posterior's distribution function at the angles, by the trapezoidal rule."""
    density = np.sin(_ANGLES) ** (2 * solved) * np.cos(_ANGLES) ** (2 * (samples - solved))
    sums = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return sums / sums[-1]


def _power_mean(a: float, b: float, power: int) -> float:
    """The mean of p^power under Beta(a, b)."""
    return math.exp(math.lgamma(a + power) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(a + b + power))
