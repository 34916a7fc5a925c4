"""How often each head of an ensemble takes a row: a bootstrap of its own.

A draw with replacement of as many rows as there are takes each row about Poisson(1) times, and these counts can be drawn row by row
(Oza and Russell 2001, online bagging); heads on one backbone with masks of their own are those of bootstrapped DQN (Osband et al.
2016, arXiv 1602.04621). A count depends on the row's tokens, the head's number and the seed alone: no order, layout or file of the
rows changes it, a head that leaves a row out leaves it out in every epoch, and a row that is there twice is taken alike twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from mrl.data.tune_rows import TuneRow

_AT_MOST = np.cumsum([math.exp(-1) / math.factorial(count) for count in range(20)])
"""[20] the probability of at most so many."""


def bootstrap_counts(rows: Sequence[TuneRow], heads: int, *, seed: int) -> np.ndarray:
    """[R, heads] float64."""
    return np.searchsorted(_AT_MOST, [_uniform(row, heads, seed) for row in rows], side="right").astype(
        np.float64
    )


def _uniform(row: TuneRow, heads: int, seed: int) -> list[float]:
    """[heads] numbers in [0, 1] of a row."""
    tokens = hashlib.sha256()
    for each in row.responses:
        tokens.update(len(each.tokens).to_bytes(8, "little") + each.tokens.astype("<i8").tobytes())
    own = tokens.digest()
    digests = (hashlib.sha256(own + f"{seed} {head}".encode()).digest() for head in range(heads))
    return [int.from_bytes(digest[:8], "little") / 2**64 for digest in digests]
