"""Describe a micro-batch's segments to Megatron's layers: bounds, rotary angles, buckets of our own attention
and chunks of delta nets. Computed once per micro-batch; mrl/training/packing.py builds batches."""

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
from mrl.models.kernels.segment_tree import SegmentTree
from mrl.models.kernels.zigzag import rank_positions


@dataclasses.dataclass(frozen=True, slots=True)
class Zigzag:
    """Order of the tokens of all context-parallel ranks, which have early and late chunks of segments."""

    rows: torch.Tensor
    """[N] int64: row of each token of the segments, rank after rank."""
    tokens: torch.Tensor
    """[N] int64: token of each row."""


@dataclasses.dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters with additions for our layers.

    N counts the tokens of this rank; Megatron's own fields describe whole segments.
    """

    cos: Any = None
    """[N, 1, D / 2] in the compute dtype."""
    sin: Any = None
    angles: Any = None
    """RotaryTable.angles, for Transformer Engine's rotary embedding: it begins segments at position 0."""
    query_factors: Any = None
    """[N, 1, 1] float32, which multiply rotated queries, or None."""
    buckets: SegmentBuckets | None = None
    """For our own attention; Transformer Engine's uses the bounds."""
    tree: SegmentTree | None = None
    """The segments; always set."""
    cp: int = 1
    """Number of context-parallel ranks."""

    @functools.cached_property
    def chunks(self) -> Chunks:
        """The segments' chunks for delta nets, built on first use."""
        return chunk_segments(self._whole_lengths, device=self.cos.device)

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Positions inside their segments of the tokens of all context-parallel ranks, in order."""
        return torch.from_numpy(positions(self._whole_lengths)).to(self.cos.device)

    @functools.cached_property
    def zigzag(self) -> Zigzag:
        """Token order for layers that need all tokens under context parallelism, built on first use."""
        tokens = np.concatenate(
            [rank_positions(self._whole_lengths, cp=self.cp, rank=rank) for rank in range(self.cp)]
        )
        rows, tokens = (torch.from_numpy(x).to(self.cos.device) for x in (np.argsort(tokens), tokens))
        return Zigzag(rows, tokens)

    @property
    def _whole_lengths(self) -> np.ndarray:
        """[S] tokens of each segment, for layers whose states do not branch."""
        assert self.tree is not None and not self.tree.shares, "this layer needs whole sequences"
        return self.tree.lengths


def pack_segments(
    tree: SegmentTree,
    *,
    rotary: RotaryTable,
    device: torch.device,
    cp: int = 1,
    rank: int = 0,
    bucketed: bool = True,
    window: int = 0,
) -> PackedSegments:
    """Describe packed segments; `rank` of `cp` has its chunks of them.

    Args:
        bucketed: Build buckets for our own attention (PackedCore.bucketed); else nothing exceeds the tokens.
        window: Positions that windowed layers see; 0 if there are none.
    """
    offsets = tree.offsets()
    keys = tree.lengths + offsets
    places = positions(tree.lengths, cp=cp, rank=rank)
    if tree.shares:
        places += np.repeat(offsets, tree.lengths)
    at = torch.from_numpy(places).to(device)
    cos, sin = rotary.at(at)
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=_bounds(tree.lengths, device),
        cu_seqlens_kv=_bounds(keys, device),
        max_seqlen_q=int(tree.lengths.max()),
        max_seqlen_kv=int(keys.max()),
        cos=cos,
        sin=sin,
        angles=None if bucketed or tree.shares else rotary.angles,
        query_factors=None if rotary.query_factors is None else rotary.query_factors[at],
        buckets=segment_buckets(tree, dtype=cos.dtype, device=device, cp=cp, rank=rank, window=window)
        if bucketed
        else None,
        tree=tree,
        cp=cp,
    )


def _bounds(lengths: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return [S + 1] int32 bounds of consecutive spans."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
