"""What Megatron's layers are told of a microbatch's segments: bounds, rotary angles, the buckets of our own
attention and the chunks of delta nets. Computed once per microbatch; does not build batches
(mrl/training/packing.py)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mrl.models.kernels.buckets import SegmentBuckets, positions, segment_buckets
from mrl.models.kernels.delta_rule import Chunks, chunk_segments
from mrl.models.kernels.rotary import RotaryTable
from mrl.models.kernels.zigzag import kept_positions


@dataclasses.dataclass(frozen=True, slots=True)
class Zigzag:
    """The tokens of all context-parallel ranks, which have early and late chunks of segments, put in order and back."""

    rows: torch.Tensor
    """[N] int64: of each token of the segments its row, rank after rank."""
    tokens: torch.Tensor
    """[N] int64: the token of each row."""


@dataclasses.dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters with what our layers need beside them.

    N counts the tokens of this rank; Megatron's own fields describe whole segments.
    """

    cos: Any = None
    """[N, 1, D / 2] in the compute dtype."""
    sin: Any = None
    angles: Any = None
    """RotaryTable.angles, for Transformer Engine's rotary embedding."""
    buckets: SegmentBuckets | None = None
    """For our own attention; Transformer Engine's reads the bounds."""
    lengths: Any = None
    """[B] tokens of each segment, in numpy."""
    cp: int = 1
    """Ranks that share the segments."""

    @functools.cached_property
    def chunks(self) -> Chunks:
        """The segments' chunks, for delta nets; made by the first layer that asks."""
        return chunk_segments(self.lengths, device=self.cos.device)

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """The places inside their segments of all tokens, of all context-parallel ranks, in order."""
        return torch.from_numpy(positions(self.lengths)).to(self.cos.device)

    @functools.cached_property
    def zigzag(self) -> Zigzag:
        """For what needs all tokens under context parallelism; made by the first layer that asks."""
        tokens = np.concatenate(
            [kept_positions(self.lengths, cp=self.cp, rank=rank) for rank in range(self.cp)]
        )
        rows, tokens = (torch.from_numpy(x).to(self.cos.device) for x in (np.argsort(tokens), tokens))
        return Zigzag(rows, tokens)


def pack_segments(
    lengths: np.ndarray,
    *,
    rotary: RotaryTable,
    device: torch.device,
    cp: int = 1,
    rank: int = 0,
    bucketed: bool = True,
    window: int = 0,
) -> PackedSegments:
    """Parameters for segments of the given lengths [B], which follow one another; `rank` of `cp` has its
    chunks of them.

    `bucketed` is whether our own attention reads them (PackedCore.bucketed); without, nothing is larger than
    the tokens. `window`: how many positions the layers with a window see; 0 where none has one.
    """
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    cos, sin = rotary.at(torch.from_numpy(positions(lengths, cp=cp, rank=rank)).to(device))
    longest = int(lengths.max())
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=cos,
        sin=sin,
        angles=None if bucketed else rotary.angles,
        buckets=segment_buckets(lengths, dtype=cos.dtype, device=device, cp=cp, rank=rank, window=window)
        if bucketed
        else None,
        lengths=lengths,
        cp=cp,
    )
