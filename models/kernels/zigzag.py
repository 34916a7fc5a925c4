"""How context parallelism splits segments: of 2 cp equal chunks of each, rank r keeps chunks r and 2 cp - 1 -
r.

An early and a late chunk together make the same causal work on every rank; Transformer Engine's packed form
expects the same split. Pure; segments are padded here so that they divide, batches are built in
mrl/training/packing.py.
"""

from __future__ import annotations

import math

import numpy as np


def padded(lengths: np.ndarray, cp: int) -> np.ndarray:
    """Segment lengths that divide into 2 cp chunks.

    >>> padded(np.array([1, 8, 9]), 2).tolist(), padded(np.array([1, 8, 9]), 1).tolist()
    ([4, 8, 12], [1, 8, 9])
    """
    return lengths if cp == 1 else -(-lengths // (2 * cp)) * (2 * cp)


def token_multiple(*, tp: int, cp: int) -> int:
    """What the padded tokens of a microbatch must be a multiple of: chunks, and equal shares of the tp ranks.

    >>> token_multiple(tp=2, cp=1), token_multiple(tp=1, cp=2), token_multiple(tp=4, cp=2)
    (2, 4, 8)
    """
    return tp if cp == 1 else cp * math.lcm(2, tp)


def kept_positions(lengths: np.ndarray, *, cp: int, rank: int) -> np.ndarray:
    """Positions in the packed tokens that a rank keeps, segments of the (padded) lengths in order.

    >>> kept(np.array([8, 4]), cp=2, rank=0).tolist(), kept(np.array([8, 4]), cp=2, rank=1).tolist()
    ([0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10])
    """
    if cp == 1:
        return np.arange(int(lengths.sum()))
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    chunks = 2 * cp
    chunk = (np.arange(len(starts)) - starts) // np.repeat(lengths // chunks, lengths)
    return np.flatnonzero(np.minimum(chunk, chunks - 1 - chunk) == rank)
