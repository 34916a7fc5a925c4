"""Statistics over the samples of one prompt: mean, standard deviation, leave-one-out, degeneracy.

Owns group arithmetic on [B] tensors in float64. Two-pass variances: E[x^2] - E[x]^2 leaves residues that turn a
degenerate group into huge advantages. Samples that do not take part (not scored, without tokens) enter nothing.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """B samples in G groups of any size; `active` samples are the ones that count."""

    index: Tensor
    """[B] int64 group position 0..G-1."""
    count: int
    active: Tensor
    """[B] bool."""

    @classmethod
    def of(cls, group_ids: Tensor, active: Tensor) -> Groups:
        """From [B] ids of any values; equal ids are one group, wherever they stand."""
        names, index = torch.unique(group_ids, return_inverse=True)
        return cls(index=index, count=len(names), active=active)

    def total(self, values: Tensor) -> Tensor:
        """[B] to [G]: sums over active samples."""
        return values.new_zeros(self.count).index_add(0, self.index, values * self.active)

    def size(self) -> Tensor:
        """[G] float64: active samples."""
        return self.total(torch.ones(len(self.index), dtype=torch.float64, device=self.index.device))

    def mean(self, values: Tensor) -> Tensor:
        """[B] to [B]: each sample's group mean, 0 for a group without active samples."""
        return (self.total(values) / self.size().clamp(min=1))[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """[B] minus the group mean; 0 for samples that are not active."""
        return (values - self.mean(values)) * self.active

    def std(self, values: Tensor, ddof: int) -> Tensor:
        """[B] group standard deviation, 0 where it is undefined (no more than `ddof` samples)."""
        squares = self.total(self.centred(values).square())
        freedom = self.size() - ddof
        return torch.where(freedom > 0, squares / freedom.clamp(min=1), torch.zeros_like(squares)).sqrt()[
            self.index
        ]

    def mean_of_others(self, values: Tensor) -> Tensor:
        """[B] mean over the other active samples of the group; 0 where there is none."""
        others = self.size()[self.index] - 1
        return torch.where(others > 0, (self.total(values)[self.index] - values) / others.clamp(min=1), 0.0)

    def degenerate(self, values: Tensor, tolerance: float) -> Tensor:
        """[B] bool: the group has no signal; max - min <= tolerance * max |value| over its active samples.

        Also true for groups of one and of none.
        """
        infinite = torch.full((self.count,), float("inf"), dtype=values.dtype, device=values.device)
        active = values[self.active], self.index[self.active]
        high = (-infinite).scatter_reduce(0, active[1], active[0], "amax")
        low = infinite.scatter_reduce(0, active[1], active[0], "amin")
        largest = torch.maximum(high.abs(), low.abs())
        return ((high - low <= tolerance * largest) | (self.size() < 2))[self.index]
