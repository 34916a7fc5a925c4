"""Tensors that a plan brings whole, as rows of the plan like any other. Pure.

An engine gets a checkpoint tensor whole if its loaders do more than copy boxes, or if it quantises a block
that no trainer rank holds whole. It arrives in its own memory, and its last byte starts the loaders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mrl.models.tensors import SCALES, LocalTensor, TensorSlice
from mrl.resharding.planner.boxes import Box, full_shape
from mrl.resharding.planner.manifest import RankManifest

_END = ".whole"


def whole_tensor_of(target: str) -> str | None:
    """Return the checkpoint tensor that arrives whole in `target`; None for an engine parameter."""
    return target.removesuffix(_END) if target.endswith(_END) else None


def whole_target(tensor: str, shape: tuple[int, ...], dtype: str) -> LocalTensor:
    """Return the target for a whole checkpoint tensor; it is its own module."""
    zero = (0,) * len(shape)
    return LocalTensor(tensor + _END, 0, shape, dtype, (TensorSlice(tensor, zero, shape, zero),))


def with_whole_tensors(
    trainers: Sequence[RankManifest], engines: Sequence[RankManifest]
) -> list[RankManifest]:
    """Return the engine manifests with a target, in the trainer's dtype, per tensor that must come whole.

    Scales have none: whoever quantises the tensor makes them.
    """
    names = {name for engine in engines for name in engine.unplanned if not name.endswith(SCALES)}
    if not names:
        return list(engines)
    boxes: dict[str, list[Box]] = {}
    dtypes: dict[str, str] = {}
    for tensor in (t for m in {m.digest: m for m in trainers}.values() for t in m.tensors):
        for piece in (p for p in tensor.pieces if p.tensor in names):
            boxes.setdefault(piece.tensor, []).append((piece.start, piece.shape))
            dtypes.setdefault(piece.tensor, tensor.dtype)
    extended: dict[str, RankManifest] = {}
    for engine in engines:
        if engine.digest not in extended:
            targets = [
                whole_target(n, full_shape(boxes[n]), dtypes[n]) for n in engine.unplanned if n in names
            ]
            extended[engine.digest] = RankManifest.of(
                engine.rank, (*engine.tensors, *targets), engine.unplanned
            )
    return [dataclasses.replace(extended[e.digest], rank=e.rank) for e in engines]
