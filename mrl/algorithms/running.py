"""Mean and variance over everything seen so far, mergeable and saved with the run.

Chan, Golub and LeVeque's update (1979); no decay.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared deviations. A worked example: after [1, 0, 0] mean is 1/3, squares 2/3."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, values: Tensor) -> RunningMoments:
        """The moments with the [K] values added."""
        if not len(values):
            return self
        numbers = values.to(torch.float64)
        mean = float(numbers.mean())
        squares = float((numbers - mean).square().sum())
        total = self.count + len(values)
        shift = mean - self.mean
        return RunningMoments(
            count=total,
            mean=self.mean + shift * len(values) / total,
            squares=self.squares + squares + shift**2 * self.count * len(values) / total,
        )

    def std(self, ddof: int = 1) -> float:
        """Standard deviation; 0 with no more than `ddof` values."""
        return (self.squares / (self.count - ddof)) ** 0.5 if self.count > ddof else 0.0

    def state(self) -> dict[str, float]:
        """JSON values for a checkpoint; RunningMoments(**state) restores them."""
        return dataclasses.asdict(self)
