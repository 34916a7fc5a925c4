"""Sampling masks: the tokens that top_p, top_k and min_p left to draw from, per position.

The engine reports them and the trainer renormalises over them, so that both see the same policy (arXiv
2512.02556, section 3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingMasks:
    """Kept tokens of consecutive positions, position after position."""

    counts: np.ndarray
    """[T] int32 number of kept tokens; 0 where nothing was cut off."""
    tokens: np.ndarray
    """[sum of counts] uint16 or uint32."""

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]]) -> SamplingMasks:
        """Build from the kept tokens of each position."""
        counts = np.array([len(row) for row in kept], np.int32)
        tokens = np.fromiter((token for row in kept for token in row), np.uint32, int(counts.sum()))
        return cls(counts, _narrow(tokens))

    @classmethod
    def whole(cls, length: int) -> SamplingMasks:
        """Return masks of positions at which nothing was cut off."""
        return cls(np.zeros(length, np.int32), np.zeros(0, np.uint16))

    def bounds(self) -> np.ndarray:
        """Return [T + 1]: position t keeps tokens[bounds[t]:bounds[t + 1]]."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def take(self, positions: np.ndarray) -> SamplingMasks:
        """Return the masks of the positions [P], in their order."""
        starts, counts = self.bounds()[:-1][positions], self.counts[positions]
        before = np.cumsum(counts, dtype=np.int64) - counts
        places = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
        return SamplingMasks(counts, self.tokens[places])

    def part(self, start: int, end: int) -> SamplingMasks:
        """Return the masks of positions `start` to `end`."""
        bounds = self.bounds()
        return SamplingMasks(self.counts[start:end], self.tokens[bounds[start] : bounds[end]])

    def split(self, lengths: Sequence[int]) -> list[SamplingMasks]:
        """Return the masks of consecutive spans of these lengths."""
        ends = np.cumsum(lengths, dtype=np.int64)[:-1]
        parts = np.split(self.counts, ends), np.split(self.tokens, self.bounds()[ends])
        return [SamplingMasks(counts, tokens) for counts, tokens in zip(*parts, strict=True)]

    def first_outside(self, drawn: np.ndarray) -> int | None:
        """Return the first position whose token in `drawn` [T] its mask does not contain; None if all do."""
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        inside = self.counts == 0
        inside[owners[self.tokens == drawn[owners]]] = True
        return None if inside.all() else int(inside.argmin())


def join_masks(parts: Iterable[tuple[SamplingMasks | None, int]]) -> SamplingMasks | None:
    """Join the masks of consecutive spans, given with their lengths; None if no span has any."""
    spans = list(parts)
    if all(masks is None for masks, _ in spans):
        return None
    known = [SamplingMasks.whole(length) if masks is None else masks for masks, length in spans]
    return SamplingMasks(
        np.concatenate([masks.counts for masks in known]), np.concatenate([masks.tokens for masks in known])
    )


def split_masks(fields: MaskFields | None, lengths: Sequence[int]) -> Sequence[SamplingMasks | None]:
    """Return the masks of a message's responses of these lengths; None for each if it has none."""
    return [None] * len(lengths) if fields is None else fields.masks().split(lengths)


def _narrow(tokens: np.ndarray) -> np.ndarray:
    return tokens.astype(np.uint16) if tokens.max(initial=0) < 1 << 16 else tokens


class MaskFields(msgspec.Struct, array_like=True):
    """Sampling masks in a message."""

    counts: bytes
    """[T] int32."""
    tokens: bytes
    """[sum of counts] unsigned integers."""
    width: int
    """Bytes of each: 2 or 4."""

    @classmethod
    def of(cls, masks: SamplingMasks | None) -> MaskFields | None:
        if masks is None:
            return None
        counts = np.ascontiguousarray(masks.counts, np.int32)
        return cls(counts.tobytes(), masks.tokens.tobytes(), masks.tokens.itemsize)

    def masks(self) -> SamplingMasks:
        """Return the masks, as views of the message."""
        return SamplingMasks(
            np.frombuffer(self.counts, np.int32), np.frombuffer(self.tokens, f"u{self.width}")
        )
