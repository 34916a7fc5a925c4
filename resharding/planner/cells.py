"""The boxes that prove a weight sync: one trainer rank holds each whole, engine ranks need it whole. Pure.

Both ends digest every cell from their own memory, by their own manifest. A cell's name is its checkpoint
tensor and its place there, so each end's layout, the window and the sending replica do not matter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mrl.errors import WeightSyncError
from mrl.models.tensors import SCALES, LocalTensor, TensorSlice
from mrl.resharding.planner.boxes import Box, contains, overlapping_boxes
from mrl.resharding.planner.manifest import Replicas
from mrl.resharding.planner.plan import Plan
from mrl.resharding.planner.quantised import Blocks
from mrl.resharding.planner.transfers import Item, Pattern


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A box of a checkpoint tensor as engine ranks hold it: a box of scales counts blocks."""

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.start, self.shape

    def __str__(self) -> str:
        return f"{self.tensor} {list(self.start)} + {list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class AnsweredCell:
    """A cell that a trainer rank digests: the box of its tensors to read, and the form to bring it into."""

    cell: Cell
    tensor: str
    """Held checkpoint tensor; for scales, the one they belong to."""
    box: Box
    """Box in the held tensor's elements."""
    dtype: str
    """Dtype that engine ranks hold."""
    block: int = 0
    """Edge of the blocks by which the box is quantised first; 0 if it is only cast."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """Common data of the cells of all tensors of a pattern."""

    boxes: tuple[Box, ...]
    dtypes: tuple[str, ...]
    blocks: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    """By box: trainer ranks that may answer for it."""
    engine_rank: np.ndarray
    """By need: engine rank."""
    number: np.ndarray
    """By need: box."""

    def needed(self, engine_rank: int) -> list[int]:
        """Return the boxes that an engine rank needs, each once."""
        return list(dict.fromkeys(self.number[self.engine_rank == engine_rank].tolist()))


class PlanCells:
    """Cells of a plan, numbered from 0, equal on all trainer ranks. Replicas take turns in answering, whoever
    sends: so replicas that differ are noticed."""

    def __init__(self, plan: Plan) -> None:
        self._items, self._trainers = plan.items, plan.trainers
        self._kinds: dict[int, _Kind] = {}
        self._first: list[int] = []
        self.count = 0
        for item in plan.items:
            if id(item.pattern) not in self._kinds:
                self._kinds[id(item.pattern)] = _kind(item, plan.engines)
            self._first.append(self.count)
            self.count += len(self._kinds[id(item.pattern)].boxes)

    def answered(self, rank: int) -> dict[int, AnsweredCell]:
        """Return, by number, the cells that a trainer rank answers for; exactly one rank answers for each."""
        result = {}
        for item, first in zip(self._items, self._first, strict=True):
            kind = self._kinds[id(item.pattern)]
            for number, ranks in enumerate(kind.candidates):
                if (
                    ranks[item.ordinal % len(ranks)] == rank
                ):  # one rank for all boxes: neighbours share cache lines
                    result[first + number] = _answer(item, kind, number)
        return result

    def needed(self, receiver: int) -> dict[int, Cell]:
        """Return, by number, the cells that make up what an engine rank needs."""
        result = {}
        for item, first in zip(self._items, self._first, strict=True):
            kind = self._kinds[id(item.pattern)]
            for number in kind.needed(receiver):
                result[first + number] = Cell(item.tensor, *kind.boxes[number])
        return result


def _kind(item: Item, engines: Sequence[Replicas]) -> _Kind:
    """Number boxes in order of the needs; equal boxes of one dtype share a number."""
    pattern: Pattern = item.pattern
    numbers: dict[tuple[Box, str], int] = {}
    blocks: list[int] = []
    holders: list[tuple[int, ...]] = []
    number_of = np.empty(len(pattern.uncut), np.int64)
    for index, cell in enumerate(pattern.uncut):
        place = item.needs[cell.need]
        key = ((cell.start, cell.shape), engines[place.group].tensors[place.index].dtype)
        if key not in numbers:
            numbers[key] = len(numbers)
            blocks.append(cell.block)
            holders.append(pattern.uncut_holders[index])
        number_of[index] = numbers[key]
    return _Kind(
        tuple(box for box, _ in numbers),
        tuple(dtype for _, dtype in numbers),
        tuple(blocks),
        tuple(holders),
        pattern.uncut_needs[0],
        number_of[pattern.uncut_needs[1]],
    )


def _answer(item: Item, kind: _Kind, number: int) -> AnsweredCell:
    cell, block = Cell(item.tensor, *kind.boxes[number]), kind.blocks[number]
    tensor, box = item.tensor, cell.box
    if block and tensor not in {place.piece.tensor for place in item.holds}:
        tensor = tensor.removesuffix(SCALES)
        held = [(place.piece.start, place.piece.shape) for place in item.holds]
        box = Blocks.of(held, block).elements(*box)
    return AnsweredCell(cell, tensor, box, kind.dtypes[number], block)


# -- where a cell is -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class StridedRun:
    """`rows` runs of `cols` elements of a flat array, `stride` elements apart."""

    offset: int
    stride: int
    rows: int
    cols: int

    def of(self, flat: Any) -> Any:
        """Return the run in a flat tensor as a view [rows, cols]."""
        return flat.as_strided((self.rows, self.cols), (self.stride, 1), flat.storage_offset() + self.offset)


def run_of(shape: Sequence[int], start: Sequence[int], box: Sequence[int]) -> StridedRun:
    """Return the box of shape `box` at `start` of a contiguous array, which may have more leading dimensions.

    >>> run_of((4, 8), (1, 2), (3, 4))
    StridedRun(offset=10, stride=8, rows=3, cols=4)
    """
    box = (1,) * (len(shape) - len(box)) + tuple(box)
    offset, step = 0, 1
    cols, rows, stride = 1, 1, 0
    for size, at, length in zip(reversed(shape), reversed(start), reversed(box), strict=True):
        if rows == 1 and cols == step:
            cols *= length
        elif rows == 1 and length > 1:
            rows, stride = length, step
        elif length > 1 and stride * rows == step:
            rows *= length
        elif length > 1:
            raise WeightSyncError(f"the box {tuple(box)} at {tuple(start)} of {tuple(shape)} is not a matrix")
        offset += at * step
        step *= size
    return StridedRun(offset, stride or cols, rows, cols)


class CellPlaces:
    """Places of boxes of checkpoint tensors in a rank's tensors, by its own manifest."""

    def __init__(self, tensors: Sequence[LocalTensor]) -> None:
        self.tensors = tensors
        self._pieces: dict[str, list[tuple[int, TensorSlice]]] = {}
        for index, tensor in enumerate(tensors):
            for piece in tensor.pieces:
                self._pieces.setdefault(piece.tensor, []).append((index, piece))

    def all_of(self, tensor: str, box: Box) -> list[tuple[int, StridedRun]]:
        """Return (index of the rank's tensor, run) of every place that contains the whole box."""
        runs = []
        for index, piece in self._pieces.get(tensor, ()):
            if contains((piece.start, piece.shape), box):
                local = self.tensors[index]
                extra = len(local.shape) - len(piece.shape)
                inner = zip(piece.local_start[extra:], box[0], piece.start, strict=True)
                start = (*piece.local_start[:extra], *(to + at - low for to, at, low in inner))
                runs.append((index, run_of(local.shape, start, box[1])))
        return runs

    def one_of(self, tensor: str, box: Box) -> tuple[int, StridedRun]:
        """Return the first place that contains the whole box; raise WeightSyncError if there is none."""
        runs = self.all_of(tensor, box)
        if not runs:
            raise WeightSyncError(f"this rank must answer for {tensor} {box}, but does not hold it whole")
        return runs[0]


def require_tiled(boxes: Iterable[tuple[str, Box]], cells: Iterable[Cell], where: str) -> None:
    """Raise WeightSyncError unless cells cover every box exactly, each element once."""
    by_tensor: dict[str, list[Box]] = {}
    for cell in cells:
        by_tensor.setdefault(cell.tensor, []).append(cell.box)
    holes = [
        f"{tensor} {box}"
        for tensor, box in boxes
        if not _tiled(box, [c for c in by_tensor.get(tensor, ()) if contains(box, c)])
    ]
    if holes:
        raise WeightSyncError(
            f"{where}: the cells to prove do not cover {len(holes)} boxes exactly: {holes[:6]}"
        )


def _tiled(box: Box, cells: Sequence[Box]) -> bool:
    return sum(math.prod(shape) for _, shape in cells) == math.prod(box[1]) and not overlapping_boxes(cells)
