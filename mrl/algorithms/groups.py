"""Statistics over the samples of one prompt: mean, standard deviation, leave-one-out, degeneracy.

Owns group arithmetic on [B] tensors in float64. Variances take two passes: the residues of E[x^2] - E[x]^2
turn a degenerate group into huge advantages. Inactive samples (not scored, without tokens) enter nothing.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """B samples in G groups of any size; only `active` samples count."""

    index: Tensor
    """[B] int64 group position 0..G-1."""
    count: int
    active: Tensor
    """[B] bool."""

    @classmethod
    def of(cls, group_ids: Tensor, active: Tensor) -> Groups:
        """Build from [B] ids of any values; samples with equal ids form a group, in any order."""
        names, index = torch.unique(group_ids, return_inverse=True)
        return cls(index=index, count=len(names), active=active)

    def total(self, values: Tensor) -> Tensor:
        """Sum over active samples, [B] to [G]."""
        return values.new_zeros(self.count).index_add(0, self.index, values * self.active)

    def size(self) -> Tensor:
        """Return the [G] float64 number of active samples."""
        return self.total(torch.ones(len(self.index), dtype=torch.float64, device=self.index.device))

    def mean(self, values: Tensor) -> Tensor:
        """Return each sample's group mean, [B] to [B]; 0 for a group without active samples."""
        return (self.total(values) / self.size().clamp(min=1))[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """Subtract the group mean from [B] values; 0 for inactive samples."""
        return (values - self.mean(values)) * self.active

    def std(self, values: Tensor, ddof: int) -> Tensor:
        """Return the [B] group standard deviation, 0 if undefined (at most `ddof` samples)."""
        squares = self.total(self.centred(values).square())
        freedom = self.size() - ddof
        return torch.where(freedom > 0, squares / freedom.clamp(min=1), torch.zeros_like(squares)).sqrt()[
            self.index
        ]

    def mean_of_others(self, values: Tensor) -> Tensor:
        """Return the [B] mean over the other active samples of the group; 0 if there are none."""
        others = self.size()[self.index] - 1
        return torch.where(others > 0, (self.total(values)[self.index] - values) / others.clamp(min=1), 0.0)

    def degenerate(self, values: Tensor, tolerance: float) -> Tensor:
        """Return [B] bool: the group has no signal, as max - min <= tolerance * max |value| if active.

        Also true for groups with one active sample or none.
        """
        infinite = torch.full((self.count,), float("inf"), dtype=values.dtype, device=values.device)
        active = values[self.active], self.index[self.active]
        high = (-infinite).scatter_reduce(0, active[1], active[0], "amax")
        low = infinite.scatter_reduce(0, active[1], active[0], "amin")
        largest = torch.maximum(high.abs(), low.abs())
        return ((high - low <= tolerance * largest) | (self.size() < 2))[self.index]
