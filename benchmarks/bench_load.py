"""A load that is equal for every schedule: each response's length and reward."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np

from mrl.rewards.contract import RewardRequest


@dataclasses.dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Length of a response, drawn from a log-normal distribution by its prompt's and sample's numbers."""

    mean: float
    """Mean of the distribution before lengths are cut to `most`."""
    sigma: float
    """Standard deviation of the logarithm; 0 makes all lengths equal."""
    most: int
    seed: int

    def __call__(self, prompt: int, sample: int) -> int:
        normal = float(np.random.default_rng((self.seed, prompt, sample)).standard_normal())
        length = self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return min(max(round(length), 1), self.most)


def hashed(request: RewardRequest) -> float:
    """Return a reward in [0, 1) that depends only on the sample's name, so rewards in a group differ."""
    digest = hashlib.blake2b(request.sample_id.encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48
