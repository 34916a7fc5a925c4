"""Trees of packed segments: a sequence is the path from a root, so a shared prefix is computed once.

Numpy alone; mrl/training/prefixes.py finds the prefixes."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentTree:
    """Packed segments end to end, parents before children; a segment's tokens follow those of its parent.

    Without shared prefixes each segment is a root and a whole sequence.
    """

    lengths: np.ndarray
    """[S] int64 tokens of each segment, with the padding at its end."""
    parents: np.ndarray
    """[S] int64 segment that each one continues; -1 for a root."""

    @classmethod
    def of_roots(cls, lengths: np.ndarray) -> SegmentTree:
        """Make each sequence a segment of its own."""
        return cls(lengths.astype(np.int64), np.full(len(lengths), -1, np.int64))

    @property
    def shares(self) -> bool:
        """True if a segment continues another."""
        return bool((self.parents >= 0).any())

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def starts(self) -> np.ndarray:
        """Return [S + 1] the bounds of the segments in the packed tokens."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def offsets(self) -> np.ndarray:
        """Return [S] the tokens before each segment in its sequences.

        >>> SegmentTree(np.array([5, 2, 3]), np.array([-1, 0, 1])).offsets().tolist() [0, 5, 7]
        """
        offsets = np.zeros(len(self.lengths), np.int64)
        for segment in np.flatnonzero(self.parents >= 0).tolist():
            parent = self.parents[segment]
            offsets[segment] = offsets[parent] + self.lengths[parent]
        return offsets

    def prefix(self, segment: int) -> tuple[int, ...]:
        """Return the segments that one continues, the root first."""
        path: list[int] = []
        while (segment := int(self.parents[segment])) >= 0:
            path.append(segment)
        return tuple(reversed(path))

    def with_root(self, length: int) -> SegmentTree:
        """Append a root of `length` tokens."""
        return SegmentTree(np.append(self.lengths, length), np.append(self.parents, -1))
