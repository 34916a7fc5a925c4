"""Sums from the right along the tokens of each sequence: rewards-to-go and GAE.

Owns the time direction. Tokens the policy did not produce are skipped: the result is that of deleting them,
computing, and putting the values back.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mrl.algorithms.segments import Segments


@dataclasses.dataclass(frozen=True, slots=True)
class Compact:
    """Masked-in tokens of each sequence side by side: [B, L], left-aligned, 0 after the end."""

    rows: Tensor
    """[K] int64 sequence of each masked-in token."""
    columns: Tensor
    """[K] int64 its position among its sequence's masked-in tokens."""
    positions: Tensor
    """[K] int64 its flat position."""
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Tensor, segments: Segments) -> Compact:
        """From a flat [N] bool mask."""
        positions = mask.nonzero()[:, 0]
        rows = segments.ids[positions]
        counts = torch.bincount(rows, minlength=segments.count)
        starts = counts.cumsum(0) - counts
        columns = torch.arange(len(positions), device=mask.device) - starts[rows]
        longest = int(counts.max()) if len(counts) else 0
        return cls(rows=rows, columns=columns, positions=positions, shape=(segments.count, longest))

    def gather(self, values: Tensor) -> Tensor:
        """[N] to [B, L]."""
        padded = values.new_zeros(self.shape)
        padded[self.rows, self.columns] = values[self.positions]
        return padded

    def scatter(self, padded: Tensor, like: Tensor) -> Tensor:
        """[B, L] to [N], 0 off the mask."""
        flat = torch.zeros_like(like)
        flat[self.positions] = padded[self.rows, self.columns]
        return flat


def rewards_to_go(rewards: Tensor, mask: Tensor, segments: Segments, *, gamma: float) -> Tensor:
    """[N]: sum of gamma^k times the reward k policy tokens later; 0 off the mask.

    >>> rewards_to_go of [1, x, 2] with mask [1, 0, 1] and gamma 0.5 is [2, 0, 2]
    """
    compact = Compact.of(mask, segments)
    padded = compact.gather(rewards)
    if gamma == 1.0:
        return compact.scatter(padded.flip(1).cumsum(1).flip(1), rewards)
    running = padded.new_zeros(padded.shape[0])
    for t in range(padded.shape[1] - 1, -1, -1):
        running = padded[:, t] + gamma * running
        padded[:, t] = running
    return compact.scatter(padded, rewards)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, segments: Segments, *, gamma: float, lam: float
) -> Tensor:
    """[N] advantages (arXiv 1506.02438, eq. 16); the value after a sequence's last policy token is 0."""
    compact = Compact.of(mask, segments)
    reward, value = compact.gather(rewards), compact.gather(values)
    advantages = torch.zeros_like(reward)
    running = reward.new_zeros(reward.shape[0])
    after = reward.new_zeros(reward.shape[0])
    for t in range(reward.shape[1] - 1, -1, -1):
        running = reward[:, t] + gamma * after - value[:, t] + gamma * lam * running
        after = value[:, t]
        advantages[:, t] = running
    return compact.scatter(advantages, rewards)
