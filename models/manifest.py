"""What a trainer rank holds, in checkpoint terms: the one description that loading, export and resharding share.

A checkpoint tensor is a tensor of the Hugging Face folder. A `Piece` says that a box of a local parameter equals a box
of a checkpoint tensor (same shape, element for element). A `LocalTensor` is one local parameter with all its pieces;
elements no piece covers are padding. Pure: imports no engine, moves no byte.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """local[local_start : local_start + shape] == checkpoint[tensor][start : start + shape], per dimension.

    Worked example: rank 1 of tp 2 holds rows 64..127 of an embedding [128, 32]:
    Piece("model.embed_tokens.weight", start=(64, 0), shape=(64, 32), local_start=(0, 0)).
    """

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    local_start: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalTensor:
    """One parameter of one rank."""

    name: str
    """The parameter's Megatron name inside its model chunk (local layer numbers)."""
    chunk: int
    """Index of the model chunk on this rank (virtual pipeline); 0 without."""
    shape: tuple[int, ...]
    dtype: str
    """torch spelling without the prefix: float32, bfloat16."""
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of the Hugging Face folder."""

    name: str
    shape: tuple[int, ...]
    dtype: str
