"""Splits a rank's batch into packed microbatches. Pure: numpy in, numpy out.

Segments are never split over microbatches, nor are groups of a batch that keeps them whole. Where the samples' microbatches were agreed
over ranks (balance.py) they are those. Else longest first, so that a microbatch holds segments of similar
length (the attention pads them into few buckets). With
context parallelism segments are padded at their ends, so that each divides into chunks; here a microbatch is
whole.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.models.kernels.zigzag import padded, token_multiple
from mrl.samples import TrainBatch


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatch:
    """Some of a batch's samples, packed; padded by one segment of token 0 to a multiple of the split."""

    samples: np.ndarray
    """[S] positions in the batch; empty for a dummy microbatch."""
    token_index: np.ndarray
    """[n] position in the batch's flat arrays of each real token."""
    places: np.ndarray
    """[n] position in `tokens` of each real token."""
    lengths: np.ndarray
    """[S] or [S + 1] tokens per segment with its padding, the padding segment last."""
    tokens: np.ndarray
    """[n + padding] int64."""


def split_samples(lengths: np.ndarray, *, max_tokens: int) -> list[np.ndarray]:
    """Deals sample positions out to microbatches: at most max_tokens each, a longer sample alone.

    >>> [m.tolist() for m in split_samples(np.array([5, 2, 4, 9, 3]), max_tokens=8)]
    [[3], [0], [2, 4], [1]]
    """
    order = np.argsort(-lengths, kind="stable")
    parts: list[list[int]] = []
    left = 0
    for position in order.tolist():
        size = int(lengths[position])
        if not parts or size > left:
            parts.append([])
            left = max_tokens
        parts[-1].append(position)
        left -= size
    return [np.asarray(part, np.int64) for part in parts]


def _parts(batch: TrainBatch, *, max_tokens: int, cp: int) -> list[np.ndarray]:
    """The samples of each microbatch; where the batch keeps groups whole, a group is dealt out as one."""
    if (agreed := batch.microbatches) is not None:
        return [np.flatnonzero(agreed == number) for number in range(int(agreed.max(initial=-1)) + 1)]
    lengths = padded(batch.lengths(), cp)
    if not batch.whole_groups or not len(lengths):
        return split_samples(lengths, max_tokens=max_tokens)
    starts = np.flatnonzero(np.append(True, batch.group_ids[1:] != batch.group_ids[:-1]))
    groups = np.split(np.arange(len(lengths)), starts[1:])
    dealt = split_samples(np.add.reduceat(lengths, starts), max_tokens=max_tokens)
    return [np.concatenate([groups[number] for number in part]) for part in dealt]


def pack_samples(batch: TrainBatch, samples: np.ndarray, *, tp: int = 1, cp: int = 1) -> Microbatch:
    """Packs the given samples; no samples give a dummy microbatch of padding."""
    own = batch.lengths()[samples].astype(np.int64)
    lengths = padded(own, cp)
    inside = np.arange(int(own.sum())) - np.repeat(np.cumsum(own) - own, own)
    token_index = batch.positions(samples)
    places = inside + np.repeat(np.cumsum(lengths) - lengths, own)
    multiple, size = token_multiple(tp=tp, cp=cp), int(lengths.sum())
    padding = -size % multiple if size else max(multiple, 2)
    tokens = np.zeros(size + padding, np.int64)
    tokens[places] = batch.tokens[token_index]
    if padding:
        lengths = np.append(lengths, padding)
    return Microbatch(samples=samples, token_index=token_index, places=places, lengths=lengths, tokens=tokens)


def count_microbatches(batch: TrainBatch, *, max_tokens: int, cp: int = 1) -> int:
    """How many microbatches the batch needs; at least one."""
    return max(1, len(_parts(batch, max_tokens=max_tokens, cp=cp)))


def pack_microbatches(
    batch: TrainBatch, *, max_tokens: int, num_microbatches: int, tp: int = 1, cp: int = 1
) -> list[Microbatch]:
    """Packs exactly `num_microbatches`, at least what count_microbatches() gives; the rest are dummies."""
    parts = _parts(batch, max_tokens=max_tokens, cp=cp)
    assert len(parts) <= num_microbatches, f"{len(parts)} microbatches, agreed {num_microbatches}"
    parts += [np.zeros(0, np.int64)] * (num_microbatches - len(parts))
    return [pack_samples(batch, part, tp=tp, cp=cp) for part in parts]
