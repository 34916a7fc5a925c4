"""Quantised tensors that trainer ranks cut inside a block: they leave the plan, module by module. Pure.

Ranks that hold a part of a block each would have to agree on its scale before anyone could send. Such a tensor goes the
gather path's way instead, whole and in the trainer's dtype, and is quantised where it arrives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from mrl.resharding.planner.boxes import Box, cells, contains
from mrl.resharding.planner.manifest import RankManifest, whole_modules
from mrl.resharding.planner.quantised import VALUES, Blocks, quantises


def leave_whole(
    trainers: Sequence[RankManifest], engines: Sequence[RankManifest], block: int
) -> list[RankManifest]:
    """The engine manifests without the modules that need a block which no trainer rank holds whole: `unplanned` names what
    feeds them. Without quantised tensors, the engine manifests as they are."""
    if not any(t.dtype == VALUES for d in engines for t in d.tensors):
        return list(engines)
    cut = cut_inside_blocks(trainers, block)
    known: dict[str, RankManifest] = {}
    for engine in engines:
        if engine.digest not in known:
            known[engine.digest] = _without(engine, cut)
    return [dataclasses.replace(known[d.digest], rank=d.rank) for d in engines]


def cut_inside_blocks(trainers: Sequence[RankManifest], block: int) -> set[str]:
    """Names of the tensors with a block that no rank holds whole."""
    held: dict[str, dict[Box, None]] = {}
    for manifest in {trainer.digest: trainer for trainer in trainers}.values():
        for piece in (p for tensor in manifest.tensors for p in tensor.pieces if quantises(p.tensor)):
            held.setdefault(piece.tensor, {})[piece.start, piece.shape] = None
    known: dict[tuple[Box, ...], bool] = {}
    for boxes in {tuple(found) for found in held.values()}:
        known[boxes] = _covered(boxes, block)
    return {name for name, found in held.items() if not known[tuple(found)]}


def _covered(boxes: Iterable[Box], block: int) -> bool:
    """Whether each block of the tensor that the boxes make up lies whole in one of them."""
    blocks = Blocks.of(boxes, block)
    whole = [blocks.inside(*box) for box in boxes]
    grid = ((0,) * len(blocks.full), blocks.grid)
    return all(any(contains(box, cell) for box in whole) for cell in cells(grid, whole))


def _without(manifest: RankManifest, cut: set[str]) -> RankManifest:
    feeds: dict[str, set[str]] = {}
    for tensor in manifest.tensors:
        feeds.setdefault(_module(tensor.name), set()).update(p.tensor for p in tensor.pieces)
    odd = whole_modules(feeds, {module for module, fed in feeds.items() if fed & cut})
    return RankManifest.of(
        manifest.rank,
        (tensor for tensor in manifest.tensors if _module(tensor.name) not in odd),
        {*manifest.unplanned, *(tensor for module in odd for tensor in feeds[module])},
    )


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
