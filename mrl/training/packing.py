"""Split a rank's batch into packed micro-batches. Pure: numpy in, numpy out.

Segments, and groups of a batch that keeps them whole, are never split over micro-batches. Micro-batches
agreed over ranks (balance.py) are taken as they are. Otherwise the longest samples come first, so that a
micro-batch contains segments of similar length (the attention pads them into few buckets). With context
parallelism segments are padded at their ends to divide into chunks; here a micro-batch is whole.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.models.kernels.segment_tree import SegmentTree
from mrl.models.kernels.zigzag import padded, token_multiple
from mrl.samples import TrainBatch
from mrl.training.prefixes import fitting_parts, prefix_tree


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatch:
    """Packed samples of a batch; one segment of token 0 pads them to a multiple of the split."""

    samples: np.ndarray
    """[S] positions in the batch; empty for a dummy micro-batch."""
    token_index: np.ndarray
    """[n] position in the batch's flat arrays of each real token."""
    places: np.ndarray
    """[n] position in `tokens` of each real token; tokens of a shared prefix have the same."""
    tree: SegmentTree
    """Segments with their padding; the padding segment is last."""
    tokens: np.ndarray
    """[n + padding] int64."""


def split_samples(lengths: np.ndarray, *, max_tokens: int) -> list[np.ndarray]:
    """Assign sample positions to micro-batches of at most max_tokens each; a longer sample is alone.

    >>> [m.tolist() for m in split_samples(np.array([5, 2, 4, 9, 3]), max_tokens=8)] [[3], [0], [2, 4], [1]]
    """
    order = np.argsort(-lengths, kind="stable")
    parts: list[list[int]] = []
    room = 0
    for position in order.tolist():
        size = int(lengths[position])
        if not parts or size > room:
            parts.append([])
            room = max_tokens
        parts[-1].append(position)
        room -= size
    return [np.asarray(part, np.int64) for part in parts]


def _parts(batch: TrainBatch, *, max_tokens: int, cp: int) -> list[np.ndarray]:
    """Return the samples of each micro-batch; a batch that keeps groups whole assigns each group as one."""
    if (agreed := batch.microbatches) is not None:
        parts = [np.flatnonzero(agreed == number) for number in range(int(agreed.max(initial=-1)) + 1)]
        if not batch.shares_prefixes or batch.routes is None:
            return parts
        # ranks agreed on prefixes without their routes, which may differ
        fitting = [fitting_parts(batch, part, max_tokens=max_tokens) for part in parts]
        return [samples for part in fitting for samples, _ in part]
    lengths = padded(batch.lengths(), cp)
    if not len(lengths) or not (batch.whole_groups or batch.shares_prefixes):
        return split_samples(lengths, max_tokens=max_tokens)
    units, sizes = _group_units(batch, lengths, max_tokens)
    dealt = split_samples(np.array(sizes), max_tokens=max_tokens)
    return [np.concatenate([units[number] for number in part]) for part in dealt]


def _group_units(
    batch: TrainBatch, lengths: np.ndarray, max_tokens: int
) -> tuple[list[np.ndarray], list[int]]:
    """Return the samples to compute in one micro-batch, and their tokens: groups, or fitting parts of them
    that share prefixes."""
    groups = batch.groups()
    if not batch.shares_prefixes:
        return groups, [int(lengths[group].sum()) for group in groups]
    if batch.whole_groups:
        return groups, [prefix_tree(batch, group)[0].num_tokens for group in groups]
    parts = [part for group in groups for part in fitting_parts(batch, group, max_tokens=max_tokens)]
    return [samples for samples, _ in parts], [tree.num_tokens for _, tree in parts]


def pack_samples(batch: TrainBatch, samples: np.ndarray, *, tp: int = 1, cp: int = 1) -> Microbatch:
    """Pack the given samples; no samples give a dummy micro-batch of padding."""
    token_index = batch.positions(samples)
    if batch.shares_prefixes:
        assert cp == 1, "context parallelism splits whole sequences"
        tree, places = prefix_tree(batch, samples)
    else:
        tree, places = _whole_sequences(batch.lengths()[samples].astype(np.int64), cp=cp)
    multiple, size = token_multiple(tp=tp, cp=cp), tree.num_tokens
    padding = -size % multiple if size else max(multiple, 2)
    tokens = np.zeros(size + padding, np.int64)
    tokens[places] = batch.tokens[token_index]
    if padding:
        tree = tree.with_root(padding)
    return Microbatch(samples=samples, token_index=token_index, places=places, tree=tree, tokens=tokens)


def _whole_sequences(token_counts: np.ndarray, *, cp: int) -> tuple[SegmentTree, np.ndarray]:
    """Return sequences of [S] tokens as segments with padding, and the places [n] of their tokens."""
    lengths = padded(token_counts, cp)
    inside = np.arange(int(token_counts.sum())) - np.repeat(
        np.cumsum(token_counts) - token_counts, token_counts
    )
    return SegmentTree.of_roots(lengths), inside + np.repeat(np.cumsum(lengths) - lengths, token_counts)


def count_microbatches(batch: TrainBatch, *, max_tokens: int, cp: int = 1) -> int:
    """Return how many micro-batches the batch needs, at least one."""
    return max(1, len(_parts(batch, max_tokens=max_tokens, cp=cp)))


def pack_microbatches(
    batch: TrainBatch, *, max_tokens: int, num_microbatches: int, tp: int = 1, cp: int = 1
) -> list[Microbatch]:
    """Pack exactly `num_microbatches`, at least count_microbatches(); fill up with dummies."""
    parts = _parts(batch, max_tokens=max_tokens, cp=cp)
    assert len(parts) <= num_microbatches, (
        f"{len(parts)} micro-batches, but ranks agreed on {num_microbatches}"
    )
    parts += [np.zeros(0, np.int64)] * (num_microbatches - len(parts))
    return [pack_samples(batch, part, tp=tp, cp=cp) for part in parts]
