"""Where each token belongs: one view over padded [B, T] and packed [N] tensors.

Owns reductions from tokens to sequences and back. Knows nothing of rewards or losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a [B] tensor over the ranks that hold pieces of the same sequences; differentiable when losses use it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """B sequences over N flat tokens.

    Worked example: a padded [2, 3] batch has ids [0 0 0 1 1 1]; a packed one of lengths 2 and 1 has [0 0 1].
    """

    ids: Tensor
    """[N] int64, 0..B-1, nondecreasing."""
    count: int
    """B; sequences without a token here are allowed."""
    shape: torch.Size
    """Shape of the caller's tensors, [B, T] or [N]."""

    @classmethod
    def of(
        cls,
        mask: Tensor,
        *,
        segment_ids: Tensor | None = None,
        num_segments: int | None = None,
    ) -> Segments:
        """From a [B, T] mask alone, or from an [N] mask with its `segment_ids`.

        `num_segments` is B where the last sequences have no token here (context parallel pieces).
        """
        if segment_ids is None:
            if mask.dim() != 2:
                raise ValueError(
                    f"loss_mask: shape {tuple(mask.shape)} without segment_ids; give [B, T], or packed [N] with "
                    "segment_ids [N]"
                )
            rows = torch.arange(mask.shape[0], device=mask.device).repeat_interleave(mask.shape[1])
            return cls(ids=rows, count=mask.shape[0], shape=mask.shape)
        if segment_ids.dtype != torch.int64:
            raise TypeError(f"segment_ids: dtype {segment_ids.dtype}, expected int64")
        if mask.dim() != 1 or segment_ids.shape != mask.shape:
            raise ValueError(
                f"segment_ids: shape {tuple(segment_ids.shape)}, expected [N] like loss_mask {tuple(mask.shape)}"
            )
        count = _checked_count(segment_ids, num_segments)
        return cls(ids=segment_ids, count=count, shape=mask.shape)

    def flat(self, values: Tensor) -> Tensor:
        """[B, T] or [N] to [N]."""
        return values.reshape(-1)

    def shaped(self, values: Tensor) -> Tensor:
        """[N] back to the caller's shape."""
        return values.reshape(self.shape)

    def sum(self, values: Tensor, reduce: Reduce | None = None) -> Tensor:
        """[N] to [B]: sums per sequence, over ranks too where `reduce` is given."""
        sums = values.new_zeros(self.count).index_add(0, self.ids, values)
        return sums if reduce is None else reduce(sums)

    def spread(self, values: Tensor) -> Tensor:
        """[B] to [N]: each token gets its sequence's value."""
        return values[self.ids]

    def mean(self, values: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
        """[N] to [B]: masked mean per sequence, 0 for a sequence without tokens."""
        counts = self.sum(mask.to(values.dtype), reduce)
        return self.sum(values * mask, reduce) / counts.clamp(min=1)


def _checked_count(segment_ids: Tensor, num_segments: int | None) -> int:
    if segment_ids.numel() == 0:
        return num_segments or 0
    if bool((segment_ids[1:] < segment_ids[:-1]).any()) or int(segment_ids[0]) < 0:
        raise ValueError("segment_ids: must be 0..B-1 and nondecreasing along the tokens")
    needed = int(segment_ids[-1]) + 1
    if num_segments is not None and num_segments < needed:
        raise ValueError(f"segment_ids: holds id {needed - 1}, but there are only {num_segments} sequences")
    return needed if num_segments is None else num_segments
