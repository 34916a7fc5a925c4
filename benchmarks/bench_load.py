"""A load that is the same for every schedule: how long each response is, and its reward."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np

from mrl.rewards.contract import RewardRequest


@dataclasses.dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """A response's tokens, drawn from a log-normal distribution by the numbers of its prompt and sample alone."""

    mean: float
    """Of the distribution, before what is too long is cut."""
    sigma: float
    """Standard deviation of the logarithm; 0 makes all alike."""
    most: int
    """Longer ones are cut to this."""
    seed: int

    def __call__(self, prompt: int, sample: int) -> int:
        normal = float(np.random.default_rng((self.seed, prompt, sample)).standard_normal())
        length = self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return min(max(round(length), 1), self.most)


def hashed(request: RewardRequest) -> float:
    """A reward in [0, 1) by the sample's name alone, so that the rewards of a group differ whatever the policy says."""
    digest = hashlib.blake2b(request.sample_id.encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48
