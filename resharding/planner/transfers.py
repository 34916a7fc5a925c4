"""Who sends what to whom: checkpoint tensors in classes, with one pattern of transfers per class. Pure.

Tensors that the same ranks hold and need in the same boxes form a class (for example the experts of one
expert-parallel rank in one pipeline stage); its pattern is computed once. The sender of a cell is a closed
form of the pattern and the tensor's ordinal in its class, so every rank knows any choice without a search. A
pattern of thousands of slots has as many transfers: columns, of which only one slot's become objects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from mrl.errors import WeightSyncError
from mrl.models.tensors import SCALES
from mrl.resharding.planner.boxes import Box, cells, contains, intersection, overlapping_boxes
from mrl.resharding.planner.manifest import DTYPE_BYTES, WIRE_DTYPES, Replicas
from mrl.resharding.planner.nearest import NearestRanks, times_before
from mrl.resharding.planner.need_forms import BoxPlace, PlainForm, form_of, relative
from mrl.resharding.planner.quantised import Blocks
from mrl.resharding.planner.topology import Topology

WIRE_BYTES = np.array([DTYPE_BYTES[name] for name in WIRE_DTYPES])
"""Bytes per element, by number of the wire dtype."""
LONGEST_PERIOD = 64
"""Largest period of a pattern."""


@dataclasses.dataclass(frozen=True, slots=True)
class NeededCell:
    """A cell of one need, in the need's units: a cell of scales counts blocks."""

    need: int
    start: tuple[int, ...]
    """Start in the checkpoint tensor."""
    shape: tuple[int, ...]
    target: tuple[int, ...]
    """Start relative to the needed box."""
    extent: tuple[int, ...]
    """Shape in elements of the held tensor."""
    block: int
    """Edge of the blocks that the sender quantises; 0 if it only casts."""

    @property
    def unit(self) -> int:
        """Multiple at which the cell may be cut."""
        return self.block if self.block and self.extent == self.shape else 1


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One cell of one need of one engine rank, and the trainer rank that sends it."""

    engine_rank: int
    cell: NeededCell
    sender: int
    hold: int
    """Index of the sender's box among the tensor's holdings."""
    origin: tuple[int, ...]
    """Start of the cell in the sender's box, in its elements."""
    wire: int

    def trainer_box(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Return the box of a part of the cell in the trainer rank's elements, relative to the origin."""
        cell = self.cell
        if not cell.block or cell.extent == cell.shape:
            return start, shape
        return Blocks(cell.extent, cell.block).elements(start, shape)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """All transfers of one class, by engine rank, need and cell; each column has one entry per transfer.

    A transfer's candidates are `candidates[first : first + count]`."""

    cells: tuple[NeededCell, ...]
    engine_rank: np.ndarray
    cell: np.ndarray
    """Index into `cells`."""
    first: np.ndarray
    count: np.ndarray
    turn: np.ndarray
    distance: np.ndarray
    wire: np.ndarray
    candidates: np.ndarray
    """Trainer ranks."""
    holds: np.ndarray
    """By candidate, the index of its box among the tensor's holdings."""
    period: int
    """Ordinals are taken modulo this period."""
    bytes_not_on_slot: int
    """Bytes that engine ranks need and their own slot lacks, from the boxes alone (lower bound)."""
    form: PlainForm

    def __len__(self) -> int:
        return len(self.engine_rank)

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each transfer, in wire dtype."""
        volumes = np.array([math.prod(cell.shape) for cell in self.cells], dtype=np.int64)
        return volumes[self.cell] * WIRE_BYTES[self.wire]

    def senders(self, ordinal: int) -> np.ndarray:
        """Return, by transfer, the sender of the tensor with this ordinal: candidates take turns."""
        return self.candidates[self._chosen(ordinal)]

    def _chosen(self, ordinal: int) -> np.ndarray:
        return self.first + (self.turn + ordinal) % self.count

    def all_candidates(self, transfers: np.ndarray) -> np.ndarray:
        """Return the sorted trainer ranks that are candidates of any transfer in a mask."""
        spans = np.unique(np.stack([self.first[transfers], self.count[transfers]]), axis=1)
        return np.unique(np.concatenate([self.candidates[at : at + n] for at, n in spans.T]))

    def of_ranks(self, trainer_rank: int | None, engine_rank: int | None, ordinal: int) -> list[Transfer]:
        """Return what a trainer rank sends and an engine rank receives of the tensor with this ordinal."""
        chosen = self._chosen(ordinal)
        selected = (self.candidates[chosen] == trainer_rank) | (self.engine_rank == engine_rank)
        return [self._transfer(number, int(chosen[number])) for number in np.flatnonzero(selected).tolist()]

    def _transfer(self, number: int, chosen: int) -> Transfer:
        cell, hold = self.cells[self.cell[number]], int(self.holds[chosen])
        return Transfer(
            engine_rank=int(self.engine_rank[number]),
            cell=cell,
            sender=int(self.candidates[chosen]),
            hold=hold,
            origin=self.form.origin((cell.start, cell.shape), hold),
            wire=int(self.wire[number]),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint tensor that some engine rank needs."""

    tensor: str
    holds: tuple[BoxPlace, ...]
    needs: tuple[BoxPlace, ...]
    pattern: Pattern
    ordinal: int


def places_of(groups: Sequence[Replicas]) -> dict[str, list[BoxPlace]]:
    """Return every box of every checkpoint tensor, by tensor, in order of group and tensor."""
    places: dict[str, list[BoxPlace]] = {}
    for number, group in enumerate(groups):
        for index, tensor in enumerate(group.tensors):
            for piece in tensor.pieces:
                places.setdefault(piece.tensor, []).append(BoxPlace(number, index, piece))
    return places


def items(
    trainers: Sequence[Replicas], engines: Sequence[Replicas], topology: Topology, *, block: int
) -> list[Item]:
    """Return an item per needed checkpoint tensor, in order of first need.

    `block`: edge of the blocks of tensors that are needed quantised and held wider. Raises WeightSyncError
    with the boxes that no trainer rank holds.
    """
    held, needed = places_of(trainers), places_of(engines)
    sides = _Sides.of(trainers, engines, topology)
    patterns: dict[tuple, tuple[Pattern, list[int]]] = {}
    result, missing = [], []
    for tensor, needs in needed.items():
        scales = tensor.endswith(SCALES) and tensor not in held
        holds = held.get(tensor.removesuffix(SCALES) if scales else tensor, [])
        key = (scales, _key(holds, trainers), _key(needs, engines))
        if key not in patterns:
            try:
                form = form_of(tensor, holds, needs, trainers, engines, block, scales=scales)
                pattern = _Class(holds, needs, sides, form).pattern()
                patterns[key] = (pattern, [0])
            except WeightSyncError as error:
                missing.append(str(error))
                continue
        pattern, count = patterns[key]
        result.append(Item(tensor, tuple(holds), tuple(needs), pattern, count[0] % pattern.period))
        count[0] += 1
    if missing:
        raise WeightSyncError(
            f"no trainer rank holds {len(missing)} tensors or boxes that the rollout needs: "
            + "; ".join(missing[:20])
        )
    return result


def _key(places: Iterable[BoxPlace], groups: Sequence[Replicas]) -> tuple:
    return tuple(
        (p.group, p.piece.start, p.piece.shape, groups[p.group].tensors[p.index].dtype) for p in places
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Sides:
    """Common input of all classes' patterns."""

    trainers: Sequence[Replicas]
    engines: Sequence[Replicas]
    nearest: NearestRanks
    engine_ranks: Sequence[np.ndarray]
    """By group of engine ranks."""
    group_beside: np.ndarray
    """By engine rank: the group of its slot's trainer rank; -1 if there is none."""

    @classmethod
    def of(cls, trainers: Sequence[Replicas], engines: Sequence[Replicas], topology: Topology) -> _Sides:
        nearest = NearestRanks(topology)
        group_of = np.full(len(topology.trainer_slots) + 1, -1)  # the last entry stands for no rank
        for number, group in enumerate(trainers):
            group_of[list(group.ranks)] = number
        ranks = [np.array(group.ranks, np.int32) for group in engines]
        return cls(trainers, engines, nearest, ranks, group_of[nearest.trainer_on_slot])


class _Class:
    """Tensors of one class: which trainer ranks hold which boxes, which engine ranks need which."""

    def __init__(
        self, holds: Sequence[BoxPlace], needs: Sequence[BoxPlace], sides: _Sides, form: PlainForm
    ) -> None:
        self._sides, self._form = sides, form
        self._holds, self._needs = holds, needs
        self._held_dtypes = [sides.trainers[p.group].tensors[p.index].dtype for p in holds]
        self._grid: dict[Box, list[Box]] = {}
        self._holders: dict[Box, dict[int, int]] = {}
        self._covered: dict[tuple[Box, int], int] = {}

    def pattern(self) -> Pattern:
        """Return the class's transfers; raise WeightSyncError for a cell that no trainer rank holds."""
        listed = [self._columns(need) for need in range(len(self._needs))]
        needed = [cell for cells_of_need, _ in listed for cell in cells_of_need]
        columns, candidates, holds, at, cell_at = [], [], [], 0, 0
        for _, tables in listed:
            for table, ranks, held in tables:
                table["first"] += at
                table["cell"] = cell_at
                columns.append(table)
                candidates.append(ranks)
                holds.append(held)
                at, cell_at = at + len(ranks), cell_at + 1
        table = np.concatenate(columns) if columns else np.empty(0, _ROW)
        table = table[np.lexsort((table["cell"], table["engine_rank"]))]
        counts = np.unique(table["count"]).tolist()
        return Pattern(
            cells=tuple(needed),
            engine_rank=table["engine_rank"].copy(),
            cell=table["cell"].copy(),
            first=table["first"].copy(),
            count=table["count"].copy(),
            turn=times_before(table["choice"]),
            distance=table["distance"].copy(),
            wire=table["wire"].copy(),
            candidates=np.concatenate(candidates) if candidates else np.empty(0, np.int32),
            holds=np.concatenate(holds) if holds else np.empty(0, np.int32),
            period=min(math.lcm(*counts), LONGEST_PERIOD),
            bytes_not_on_slot=sum(self._bytes_not_on_slot(need) for need in self._needs),
            form=self._form,
        )

    def _columns(self, need: int) -> tuple[list[NeededCell], list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Return a need's cells, and per cell its rows, candidates and the candidates' holdings."""
        box = self._needs[need].box
        self._form.check(box)
        if box not in self._grid:
            self._grid[box] = list(cells(box, {b for b in self._form.boxes if intersection(b, box)}))
        needed, tables = [], []
        for cell in self._grid[box]:
            needed.append(
                NeededCell(
                    need,
                    start=cell[0],
                    shape=cell[1],
                    target=relative(cell[0], box[0]),
                    extent=self._form.extent(cell),
                    block=self._form.block,
                )
            )
            tables.append(self._rows(cell, self._needs[need]))
        return needed, tables

    def _rows(self, cell: Box, place: BoxPlace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        holders, engine_ranks = self._holders_of(cell), self._sides.engine_ranks[place.group]
        nearest = self._sides.nearest.of(tuple(holders))
        holds = np.array(list(holders.values()), np.int32)[nearest.positions]
        choice = nearest.of_engine[engine_ranks]
        rows = np.empty(len(engine_ranks), _ROW)
        rows["engine_rank"], rows["choice"] = engine_ranks, nearest.ids[choice]
        rows["first"], rows["count"] = nearest.first[choice], nearest.count[choice]
        rows["distance"] = nearest.distance[choice]
        rows["wire"] = self._wires(holds[rows["first"]], rows["distance"] == 0, self._dtype(place))
        return rows, nearest.ranks, holds

    def _dtype(self, need: BoxPlace) -> str:
        return self._sides.engines[need.group].tensors[need.index].dtype

    def _wires(self, holds: np.ndarray, local: np.ndarray, dtype: str) -> np.ndarray:
        """Return, by transfer, the number of its wire dtype, from its first candidate's holding."""
        wires = np.array(
            [
                [self._form.wire(held, dtype, local=local_copy) for local_copy in (False, True)]
                for held in self._held_dtypes
            ]
        )
        return wires[holds, local.astype(int)]

    def _holders_of(self, cell: Box) -> dict[int, int]:
        """Return trainer rank -> its first holding that contains the whole cell, in order of rank."""
        if cell not in self._holders:
            holders: dict[int, int] = {}
            for hold, place in enumerate(self._holds):
                if contains(self._form.boxes[hold], cell):
                    for rank in self._sides.trainers[place.group].ranks:
                        holders.setdefault(rank, hold)
            if not holders:
                raise WeightSyncError(f"{self._form.tensor} [start {cell[0]}, shape {cell[1]}]")
            self._holders[cell] = dict(sorted(holders.items()))
        return self._holders[cell]

    def _bytes_not_on_slot(self, need: BoxPlace) -> int:
        """Return the bytes of one need that are missing on its engine ranks' own slots."""
        ranks = self._sides.engine_ranks[need.group]
        lacking = len(ranks) * math.prod(need.box[1])
        groups, times = np.unique(self._sides.group_beside[ranks], return_counts=True)
        for group, number in zip(groups.tolist(), times.tolist(), strict=True):
            lacking -= number * self._covered_by(need.box, group)
        wire = self._form.wire(self._held_dtypes[0], self._dtype(need), local=False)
        return lacking * int(WIRE_BYTES[wire])

    def _covered_by(self, box: Box, group: int) -> int:
        """Return the number of a box's elements that a group of trainer ranks holds."""
        if (box, group) not in self._covered:
            boxes = [self._form.boxes[hold] for hold, place in enumerate(self._holds) if place.group == group]
            self._covered[box, group] = _covered(box, boxes)
        return self._covered[box, group]


_ROW = np.dtype(
    [
        ("engine_rank", np.int32),
        ("cell", np.int32),
        ("choice", np.int32),
        ("first", np.int32),
        ("count", np.int32),
        ("distance", np.int8),
        ("wire", np.int8),
    ]
)


def _covered(box: Box, boxes: Iterable[Box]) -> int:
    """Return the number of a box's elements that the other boxes cover."""
    common = sorted({c for c in (intersection(b, box) for b in boxes) if c})
    if overlapping_boxes(common):
        return sum(math.prod(c[1]) for c in cells(box, common) if any(contains(b, c) for b in common))
    return sum(math.prod(shape) for _, shape in common)
