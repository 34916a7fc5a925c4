"""Split segments for context parallelism: of 2 cp equal chunks of each, rank r has chunks r and 2 cp - 1 - r.

An early and a late chunk together give every rank the same causal work; Transformer Engine's packed form
expects the same split. Pure; pads segments so that they divide, while mrl/training/packing.py builds batches.
"""

from __future__ import annotations

import math

import numpy as np


def padded(lengths: np.ndarray, cp: int) -> np.ndarray:
    """Round segment lengths up so that they divide into 2 cp chunks.

    >>> padded(np.array([1, 8, 9]), 2).tolist(), padded(np.array([1, 8, 9]), 1).tolist()
    ([4, 8, 12], [1, 8, 9])
    """
    return lengths if cp == 1 else -(-lengths // (2 * cp)) * (2 * cp)


def token_multiple(*, tp: int, cp: int) -> int:
    """Return the divisor of a micro-batch's padded tokens, for chunks and equal shares of the tp ranks.

    >>> token_multiple(tp=2, cp=1), token_multiple(tp=1, cp=2), token_multiple(tp=4, cp=2)
    (2, 4, 8)
    """
    return tp if cp == 1 else cp * math.lcm(2, tp)


def rank_positions(lengths: np.ndarray, *, cp: int, rank: int) -> np.ndarray:
    """Return the positions in the packed tokens that a rank has, for segments of the (padded) lengths.

    >>> kept = rank_positions
    >>> kept(np.array([8, 4]), cp=2, rank=0).tolist(), kept(np.array([8, 4]), cp=2, rank=1).tolist()
    ([0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10])
    """
    if cp == 1:
        return np.arange(int(lengths.sum()))
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    chunks = 2 * cp
    chunk = (np.arange(len(starts)) - starts) // np.repeat(lengths // chunks, lengths)
    return np.flatnonzero(np.minimum(chunk, chunks - 1 - chunk) == rank)
