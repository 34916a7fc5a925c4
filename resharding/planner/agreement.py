"""Requirements on a plan's manifests: trainer and engines have the same checkpoint tensors in the same full
shapes, engines take all of each, and every element of an engine tensor is written once. Pure.

vLLM's loaders take the rows that their parameters have room for and ignore the rest: an engine with narrower
experts or fewer heads than the trainer would silently serve a part of the weights. Legitimate differences are
not boxes of checkpoint tensors (padding, derived tensors), other names for one (tied layers), or scales of
quantised tensors, which are made from the trainer's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mrl.errors import ConfigError, WeightSyncError
from mrl.models.tensors import SCALES, CheckpointTensor, LocalTensor, TensorSlice
from mrl.resharding.planner.boxes import Box, cells, contains, full_shape, overlapping_boxes
from mrl.resharding.planner.manifest import WIRE_DTYPES, RankManifest, Replicas

_NAMED = 20
"""Tensors that one error lists at most."""
_Boxes = dict[str, dict[Box, None]]
"""Distinct boxes of each checkpoint tensor, in order of first mention."""


def require_agreement(trainers: Sequence[RankManifest], engines: Sequence[RankManifest]) -> None:
    """Raise WeightSyncError naming every tensor that trainer and engine ranks have in different shapes, or
    that engine ranks take only in part.

    Of tensors that an engine takes whole (`unplanned`), only names are compared: loaders see the whole.
    """
    held, needed = _boxes(trainers), _boxes(engines)
    whole = {name for manifest in engines for name in manifest.unplanned if not name.endswith(SCALES)}
    wrong = [
        f"{name} {full_shape(held[name])}: no engine rank takes it"
        for name in held.keys() - needed.keys() - whole
    ]
    wrong += [
        f"{name} {full_shape(needed[name])}: no trainer rank holds it" for name in needed.keys() - held.keys()
    ]
    wrong += [f"{name}: no trainer rank holds it" for name in whole - held.keys() - needed.keys()]
    full: dict[tuple[Box, ...], bool] = {}
    for name in held.keys() & needed.keys():
        ours, theirs = full_shape(held[name]), full_shape(needed[name])
        if ours != theirs:
            wrong.append(f"{name}: the trainer has {ours}, the engines {theirs}")
        elif name not in whole:
            boxes = tuple(needed[name])
            if boxes not in full:
                full[boxes] = _covers(boxes, theirs)
            if not full[boxes]:
                wrong.append(f"{name} {theirs}: the engines take only {sorted(boxes)[:4]} (start, shape)")
    if wrong:
        suffix = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise WeightSyncError(
            f"trainer and engines do not have the same tensors: {'; '.join(sorted(wrong)[:_NAMED])}{suffix}"
        )


def as_one_rank(checkpoint: Iterable[CheckpointTensor]) -> RankManifest:
    """Return the manifest of a rank that holds a whole checkpoint."""
    tensors = []
    for tensor in checkpoint:
        zero = (0,) * len(tensor.shape)
        piece = TensorSlice(tensor.name, zero, tensor.shape, zero)
        tensors.append(LocalTensor(tensor.name, 0, tensor.shape, tensor.dtype, (piece,)))
    return RankManifest.of(0, tensors)


def _boxes(manifests: Sequence[RankManifest]) -> _Boxes:
    boxes: _Boxes = {}
    for manifest in {m.digest: m for m in manifests}.values():
        for piece in (piece for tensor in manifest.tensors for piece in tensor.pieces):
            if not piece.tensor.endswith(SCALES):
                boxes.setdefault(piece.tensor, {})[piece.start, piece.shape] = None
    return boxes


def _covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    whole: Box = ((0,) * len(shape), shape)
    return all(any(contains(box, cell) for box in boxes) for cell in cells(whole, boxes))


def require_slots(side: str, manifests: Sequence[RankManifest], slots: Sequence[int]) -> None:
    """Raise ConfigError unless each manifest has a slot, in rank order; WeightSyncError for unknown
    dtypes."""
    if [manifest.rank for manifest in manifests] != list(range(len(manifests))):
        raise ConfigError(
            f"{side} manifests must be in rank order from 0, got {[m.rank for m in manifests][:16]}"
        )
    if len(manifests) != len(slots):
        raise ConfigError(
            f"{len(manifests)} {side} manifests but the topology places {len(slots)} {side} ranks"
        )
    for tensor in (t for manifest in manifests for t in manifest.tensors):
        if tensor.dtype not in WIRE_DTYPES:
            raise WeightSyncError(
                f"{side} tensor {tensor.name} has dtype {tensor.dtype}, but plans move only {WIRE_DTYPES}"
            )


def require_written_once(group: Replicas) -> None:
    """Raise WeightSyncError if an element of an engine tensor is in two boxes or in none.

    Padding at the end of the first dimension (a padded vocabulary) may be in none."""
    for tensor in group.tensors:
        if not tensor.shape:
            continue  # one element, one box
        boxes = []
        for piece in tensor.pieces:
            extra = len(tensor.shape) - len(piece.shape)
            boxes.append((piece.local_start, (1,) * extra + piece.shape))
        where = f"engine rank {group.ranks[0]}: {tensor.name} {tensor.shape}"
        for start, shape in boxes:
            if any(
                low < 0 or low + size > whole
                for low, size, whole in zip(start, shape, tensor.shape, strict=True)
            ):
                raise WeightSyncError(f"{where}: box at {start} of shape {shape} reaches outside")
        if twice := overlapping_boxes(boxes):
            raise WeightSyncError(f"{where}: boxes {twice[0]} and {twice[1]} would write the same elements")
        filled = max((start[0] + shape[0] for start, shape in boxes), default=0)
        if sum(math.prod(shape) for _, shape in boxes) != math.prod((filled, *tensor.shape[1:])):
            piece = tensor.pieces[0]
            raise WeightSyncError(
                f"{where}: no box covers some of its first {filled} rows; the trainer's {piece.tensor} gives "
                f"it {piece.shape}"
            )
