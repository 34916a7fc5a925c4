"""Splits a rank's batch into packed microbatches. Pure: numpy in, numpy out.

Segments are never split. Longest first, so that a microbatch holds segments of similar length (the attention pads them
into few buckets). Microbatches are as even as their limit allows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.samples import TrainBatch


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatch:
    """Some of a batch's samples, packed; padded by one segment of token 0 to a multiple of the sequence split."""

    samples: np.ndarray
    """[S] positions in the batch; empty for a dummy microbatch."""
    token_index: np.ndarray
    """[n] position in the batch's flat arrays of each real token."""
    lengths: np.ndarray
    """[S] or [S + 1] tokens per segment, the padding segment last."""
    tokens: np.ndarray
    """[n + padding] int64."""

    @property
    def num_real(self) -> int:
        return len(self.token_index)


def split(lengths: np.ndarray, *, max_tokens: int) -> list[np.ndarray]:
    """Sample positions per microbatch: at most max_tokens each, a longer sample alone.

    >>> [m.tolist() for m in split(np.array([5, 2, 4, 9, 3]), max_tokens=8)]
    [[3], [0], [2, 4], [1]]
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


def microbatch(batch: TrainBatch, samples: np.ndarray, *, multiple_of: int) -> Microbatch:
    """Pack the given samples; no samples give a dummy microbatch of padding."""
    lengths = batch.lengths()[samples].astype(np.int64)
    starts = batch.cu_seqlens[:-1][samples].astype(np.int64)
    total = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    token_index = np.arange(total) - np.repeat(offsets, lengths) + np.repeat(starts, lengths)
    padding = -total % multiple_of if total else max(multiple_of, 2)
    tokens = np.concatenate([batch.tokens[token_index], np.zeros(padding, np.int64)]).astype(np.int64)
    if padding:
        lengths = np.append(lengths, padding)
    return Microbatch(samples=samples, token_index=token_index, lengths=lengths, tokens=tokens)


def pack(batch: TrainBatch, *, max_tokens: int, num_microbatches: int, multiple_of: int) -> list[Microbatch]:
    """Exactly `num_microbatches`, at least as many as split() gives; the missing ones are dummies."""
    parts = split(batch.lengths(), max_tokens=max_tokens)
    assert len(parts) <= num_microbatches, f"{len(parts)} microbatches, agreed {num_microbatches}"
    parts += [np.zeros(0, np.int64)] * (num_microbatches - len(parts))
    return [microbatch(batch, part, multiple_of=multiple_of) for part in parts]
