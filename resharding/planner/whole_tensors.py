"""Tensors that a plan brings whole, as rows of the plan like any other. Pure.

An engine whose loaders do more than copy boxes, or that quantises a block which no trainer rank holds whole, gets the
complete checkpoint tensor. It is received into memory of its own, as if it were a parameter, and given to the engine's
loaders when its last byte is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mrl.models.tensors import SCALES, LocalTensor, Piece
from mrl.resharding.planner.boxes import Box, full_shape
from mrl.resharding.planner.manifest import RankManifest

_END = ".whole"


def whole_tensor_of(target: str) -> str | None:
    """Return the checkpoint tensor that is received whole into `target`, or None for a parameter of the engine."""
    return target.removesuffix(_END) if target.endswith(_END) else None


def whole_target(tensor: str, shape: tuple[int, ...], dtype: str) -> LocalTensor:
    """Return what a checkpoint tensor is received into whole; it is a module of its own."""
    zero = (0,) * len(shape)
    return LocalTensor(tensor + _END, 0, shape, dtype, (Piece(tensor, zero, shape, zero),))


def with_whole_tensors(
    trainers: Sequence[RankManifest], engines: Sequence[RankManifest]
) -> list[RankManifest]:
    """Return the engine manifests with a target, in the trainer's dtype, for each tensor that must come whole.

    Scales have none: whoever quantises the tensor makes them.
    """
    wanted = {name for engine in engines for name in engine.unplanned if not name.endswith(SCALES)}
    if not wanted:
        return list(engines)
    boxes: dict[str, list[Box]] = {}
    dtypes: dict[str, str] = {}
    for tensor in (t for m in {m.digest: m for m in trainers}.values() for t in m.tensors):
        for piece in (p for p in tensor.pieces if p.tensor in wanted):
            boxes.setdefault(piece.tensor, []).append((piece.start, piece.shape))
            dtypes.setdefault(piece.tensor, tensor.dtype)
    made: dict[str, RankManifest] = {}
    for engine in engines:
        if engine.digest not in made:
            targets = [
                whole_target(n, full_shape(boxes[n]), dtypes[n]) for n in engine.unplanned if n in wanted
            ]
            made[engine.digest] = RankManifest.of(engine.rank, (*engine.tensors, *targets), engine.unplanned)
    return [dataclasses.replace(made[e.digest], rank=e.rank) for e in engines]
