"""Plan buckets of equal length for attention over packed segments, from their lengths, per micro-batch. Torch
alone; mrl/training/packing.py builds the batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mrl.models.kernels.segment_tree import SegmentTree
from mrl.models.kernels.zigzag import rank_positions


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """Slots of tokens in consecutive padded buckets; bucket i has `shapes[i]` (segments, padded length)."""

    slot_tokens: Tensor
    """[M] int64: token in each slot; padding slots repeat token 0."""
    token_slots: Tensor
    """[N] int64: slot of each token."""
    shapes: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentBuckets:
    """Buckets of a micro-batch's queries and keys, and the masks between them.

    Segments of one bucket continue the same prefix, if any: its keys precede their own.
    """

    queries: Buckets
    """Buckets of this rank's tokens."""
    keys: Buckets
    """Buckets of the tokens of all context-parallel ranks, rank after rank; equals `queries` on one rank."""
    masks: Sequence[Tensor | None]
    """Per bucket what is added to the scores [segments or 1, 1, queries, keys]: 0, or -inf for later keys and
    padding. None if queries and keys are the same, so that plain causal attention suffices."""
    windowed: Sequence[Tensor | None]
    """The same for windowed layers; None where `band` applies. A prefix's keys end at the window."""
    band: Tensor | None = None
    """[1, 1, W, 2W] mask of windowed layers, if queries and keys are the same: W queries, 2W keys up to
    them."""
    lengths: tuple[int, ...] = ()
    """Tokens of each segment, if some continue others."""
    prefixes: Sequence[tuple[int, ...]] = ()
    """Per bucket the segments that its own continue, in order; empty if none continues another."""
    window: int = 0
    """Positions that windowed layers see; 0 if there are none."""


def bucket_length(length: np.ndarray) -> np.ndarray:
    """Round up: to a multiple of 4 up to 32, then to a multiple of an eighth to a quarter of the length.

    >>> bucket_length(np.array([3, 4, 13, 33, 100])).tolist()
    [4, 4, 16, 40, 112]
    """
    step = np.where(
        length <= 32, 4, 2 ** np.maximum(2, np.floor(np.log2(np.maximum(length, 1))).astype(np.int64) - 2)
    )
    return -(-length // step) * step


def plan_buckets(
    lengths: np.ndarray, *, unit: int = 1, kinds: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, int], ...]]:
    """Return (slot_tokens [M], token_slots [N], shapes) for segments of these lengths; see Buckets.

    Lengths are multiples of `unit`; buckets follow lengths / unit, so queries and keys get the same. Segments
    of a bucket have the same kind [S], by default all have.
    """
    padded = unit * bucket_length(lengths // unit)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    slot_tokens, shapes, base = [], [], 0
    token_slots = np.zeros(int(starts[-1]), np.int64)
    for kind, size in _distinct(padded, kinds):
        members = np.flatnonzero((padded == size) & (kinds is None or kinds == kind))
        columns = np.arange(size)
        tokens = starts[members][:, None] + columns[None, :]
        valid = columns[None, :] < lengths[members][:, None]
        slots = base + np.arange(len(members) * size).reshape(len(members), size)
        token_slots[tokens[valid]] = slots[valid]
        slot_tokens.append(np.where(valid, tokens, 0).ravel())
        shapes.append((len(members), int(size)))
        base += len(members) * int(size)
    return np.concatenate(slot_tokens), token_slots, tuple(shapes)


def _distinct(padded: np.ndarray, kinds: np.ndarray | None) -> list[tuple[int, int]]:
    """Return the (kind, padded length) of the buckets of segments, in order."""
    pairs = np.stack([np.zeros_like(padded) if kinds is None else kinds, padded])
    return [(int(kind), int(size)) for kind, size in np.unique(pairs, axis=1).T]


def segment_buckets(
    tree: SegmentTree,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cp: int = 1,
    rank: int = 0,
    window: int = 0,
) -> SegmentBuckets:
    """Return the buckets of packed segments; `rank` of `cp` has its chunks of them.

    In windowed layers a position sees itself and `window` - 1 before it; `window` 0: there are none. Masks
    are of `dtype` and contain all pairs of a bucket's queries and keys.
    """
    lengths = tree.lengths
    if cp == 1:
        # a block of W queries, and the 2W keys up to its end
        band = _prefix_mask(window, window, window, dtype=dtype, device=device) if window else None
        if tree.shares:
            return _tree_buckets(tree, band, window=window, dtype=dtype, device=device)
        buckets = _on_device(*plan_buckets(lengths), device=device)
        causal = [None] * len(buckets.shapes)
        return SegmentBuckets(buckets, buckets, causal, causal, band, window=window)
    assert not tree.shares, "context parallelism splits whole sequences"
    query_positions = torch.from_numpy(positions(lengths, cp=cp, rank=rank)).to(device)
    queries = _on_device(*plan_buckets(lengths // cp, unit=2), device=device)
    keys = _gathered_keys(lengths, cp=cp, device=device)
    masks = _masks(queries, keys, query_positions, dtype=dtype)
    windowed = _masks(queries, keys, query_positions, dtype=dtype, window=window) if window else masks
    return SegmentBuckets(queries, keys, masks, windowed, window=window)


def _tree_buckets(
    tree: SegmentTree, band: Tensor | None, *, window: int, dtype: torch.dtype, device: torch.device
) -> SegmentBuckets:
    """Return buckets whose segments continue one prefix. All queries of a row see the whole prefix, so rows
    of a bucket have one mask: padding behind a row's own tokens is later than all its queries."""
    planned = plan_buckets(tree.lengths, kinds=tree.parents)
    buckets = _on_device(*planned, device=device)
    owners = np.repeat(np.arange(len(tree.lengths)), tree.lengths)
    firsts = np.cumsum([0, *(rows * length for rows, length in buckets.shapes)])[:-1]
    prefixes = [tree.prefix(int(owners[token])) for token in planned[0][firsts]]
    masks: list[Tensor | None] = []
    windowed: list[Tensor | None] = []
    for prefix, (_, length) in zip(prefixes, buckets.shapes, strict=True):
        before = int(tree.lengths[list(prefix)].sum())
        masks.append(_prefix_mask(before, length, dtype=dtype, device=device) if prefix else None)
        seen = min(before, window - 1)
        windowed.append(_prefix_mask(seen, length, window, dtype=dtype, device=device) if prefix else None)
    lengths = tuple(tree.lengths.tolist())
    return SegmentBuckets(
        buckets, buckets, masks, windowed if window else masks, band, lengths, prefixes, window
    )


def _prefix_mask(
    before: int, length: int, window: int = 0, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Build [1, 1, length, before + length]: query i sees the keys up to `before` + i, or only the last
    `window` of them."""
    queries = before + torch.arange(length, device=device)[:, None]
    return _mask(queries, before + length, window, dtype)[None, None]


def _mask(queries: Tensor, num_keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores [..., num_keys] of queries at positions [..., 1]: 0 for keys up to
    them, or only the last `window` of these; else -inf."""
    keys = torch.arange(num_keys, device=queries.device)
    unseen = keys > queries
    if window:
        unseen |= keys <= queries - window
    return torch.zeros(unseen.shape, dtype=dtype, device=queries.device).masked_fill_(unseen, -math.inf)


def positions(lengths: np.ndarray, *, cp: int = 1, rank: int = 0) -> np.ndarray:
    """Return [N], the positions inside their segments of the tokens that a rank has.

    >>> positions(np.array([3, 2])).tolist()
    [0, 1, 2, 0, 1]
    """
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (np.arange(len(starts)) - starts)[rank_positions(lengths, cp=cp, rank=rank)]


def _on_device(
    slot_tokens: np.ndarray,
    token_slots: np.ndarray,
    shapes: tuple[tuple[int, int], ...],
    *,
    device: torch.device,
) -> Buckets:
    return Buckets(torch.from_numpy(slot_tokens).to(device), torch.from_numpy(token_slots).to(device), shapes)


def _gathered_keys(lengths: np.ndarray, *, cp: int, device: torch.device) -> Buckets:
    """Return buckets of whole segments whose tokens are in gathered order: rank after rank."""
    slot_tokens, token_slots, shapes = plan_buckets(lengths, unit=2 * cp)
    gathered = np.concatenate([rank_positions(lengths, cp=cp, rank=rank) for rank in range(cp)])
    return _on_device(np.argsort(gathered)[slot_tokens], token_slots[gathered], shapes, device=device)


def _masks(
    queries: Buckets, keys: Buckets, positions: Tensor, *, dtype: torch.dtype, window: int = 0
) -> list[Tensor]:
    """Build masks: slot j of a bucket's row is position j of its segment; a query at position p sees slots
    0..p, or only the last `window` of them.

    Padding queries have some token's position, so they see at least slot 0 and give finite values.
    """
    by_bucket = positions[queries.slot_tokens].split([rows * length for rows, length in queries.shapes])
    return [
        _mask(at.view(*shape, 1), key_length, window, dtype)[:, None]
        for shape, (_, key_length), at in zip(queries.shapes, keys.shapes, by_bucket, strict=True)
    ]
