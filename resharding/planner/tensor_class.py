"""One class of checkpoint tensors: who holds and needs which boxes, and its pattern of transfers. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mrl.errors import WeightSyncError
from mrl.resharding.planner.boxes import Box, cells, contains, intersection, overlapping_boxes
from mrl.resharding.planner.even_shares import Ranks
from mrl.resharding.planner.manifest import Replicas
from mrl.resharding.planner.nearest import NearestRanks, times_before
from mrl.resharding.planner.need_forms import BoxPlace, PlainForm, relative
from mrl.resharding.planner.pool_transfers import FarCell, PoolShares
from mrl.resharding.planner.topology import Topology
from mrl.resharding.planner.transfers import LONGEST_PERIOD, WIRE_BYTES, NeededCell, Pattern


@dataclasses.dataclass(frozen=True, slots=True)
class Sides:
    """Common input of all classes' patterns."""

    trainers: Sequence[Replicas]
    engines: Sequence[Replicas]
    topology: Topology
    nearest: NearestRanks
    engine_ranks: Sequence[np.ndarray]
    """By group of engine ranks."""
    group_beside: np.ndarray
    """By engine rank: the group of its slot's trainer rank; -1 if there is none."""
    read_buckets: bool
    cut_bytes: int

    @classmethod
    def of(
        cls,
        trainers: Sequence[Replicas],
        engines: Sequence[Replicas],
        topology: Topology,
        *,
        read_buckets: bool,
        cut_bytes: int,
    ) -> Sides:
        """Collect the input; see `PlanOptions` for `read_buckets` and `cut_bytes`."""
        nearest = NearestRanks(topology)
        group_of = np.full(len(topology.trainer_slots) + 1, -1)  # the last entry stands for no rank
        for number, group in enumerate(trainers):
            group_of[list(group.ranks)] = number
        ranks = [np.array(group.ranks, np.int32) for group in engines]
        beside = group_of[nearest.trainer_on_slot]
        return cls(trainers, engines, topology, nearest, ranks, beside, read_buckets, cut_bytes)

    def nodes(self, needs: Mapping[int, int]) -> list[tuple[Ranks, list[int]]]:
        """Group engine ranks and their needs by the node whose ranks take bytes in for each other; else by
        rank."""
        slots, nodes = self.topology.engine_slots, self.topology.nodes
        grouped: dict[int, list[tuple[int, int]]] = {}
        for rank, need in sorted(needs.items()):
            grouped.setdefault(nodes[slots[rank]] if self.read_buckets else rank, []).append((rank, need))
        return [
            (tuple(rank for rank, _ in listed), [need for _, need in listed]) for listed in grouped.values()
        ]

    def distances(self, trainer_ranks: np.ndarray, engine_ranks: np.ndarray) -> np.ndarray:
        """Return the distances, as in `Topology.distance`, of ranks on different nodes."""
        topology = self.topology
        rails, slots = np.array(topology.rails), np.array(topology.trainer_slots)
        return np.where(
            rails[slots[trainer_ranks]] == rails[np.array(topology.engine_slots)[engine_ranks]], 2, 3
        )


class TensorClass:
    """Tensors of one class: which trainer ranks hold which boxes, which engine ranks need which."""

    def __init__(
        self, holds: Sequence[BoxPlace], needs: Sequence[BoxPlace], sides: Sides, form: PlainForm
    ) -> None:
        """Find the holders of every cell; raise WeightSyncError for a cell that no trainer rank holds."""
        self._sides, self._form = sides, form
        self._holds, self._needs = holds, needs
        self._held_dtypes = [sides.trainers[p.group].tensors[p.index].dtype for p in holds]
        self._grid: dict[Box, list[Box]] = {}
        self._holders: dict[Box, dict[int, int]] = {}
        self._ranks: dict[Box, Ranks] = {}
        self._covered: dict[tuple[Box, int], int] = {}
        self._columns = _Columns()
        self._far: dict[tuple[Box, int, int], dict[int, int]] = {}
        """Engine rank -> need, by far cell: its box, wire dtype, and how often the rank needs it already."""
        self._uncut: list[tuple[NeededCell, np.ndarray, Ranks]] = []
        """(cell, engine ranks that need it, trainer ranks that hold it)."""
        for need in range(len(needs)):
            self._add(need)
        self.far_cells = [self._far_cell(*key) for key in self._far]

    def pattern(self, shares: PoolShares) -> Pattern:
        """Return the class's transfers, with far cells cut by the pools' shares."""
        for cell in self.far_cells:
            self._add_pieces(cell, shares)
        columns = self._columns.joined()
        uncut_needs = columns["engine_rank"], columns["cell"]
        if self.far_cells:
            needed_by = [ranks for _, ranks, _ in self._uncut]
            numbers = np.repeat(np.arange(len(needed_by)), [len(ranks) for ranks in needed_by])
            uncut_needs = np.concatenate(needed_by), numbers
        else:  # nothing was cut: thousands of slots share memory with the columns
            columns["entry"] = np.broadcast_to(np.int32(-1), len(columns["entry"]))
        return Pattern(
            **columns,
            uncut=tuple(cell for cell, _, _ in self._uncut),
            uncut_needs=uncut_needs,
            uncut_holders=tuple(holders for _, _, holders in self._uncut),
            bytes_not_on_slot=sum(self._bytes_not_on_slot(need) for need in range(len(self._needs))),
            form=self._form,
        )

    def _add(self, need: int) -> None:
        """Add a need's cells: transfers of those that are near, the others to `_far`."""
        box, ranks = self._needs[need].box, self._sides.engine_ranks[self._needs[need].group]
        self._form.check(box)
        if box not in self._grid:
            self._grid[box] = list(cells(box, {b for b in self._form.boxes if intersection(b, box)}))
        for cell in self._grid[box]:
            needed = self._needed(need, cell)
            rows, candidates, holds = self._rows(cell, self._needs[need])
            self._uncut.append((needed, ranks, self._ranks_with(cell)))
            if self._sides.nearest.pools:
                for rank, wire in rows[rows["distance"] > 1][["engine_rank", "wire"]].tolist():
                    times = 0
                    while rank in self._far.get((cell, wire, times), ()):
                        times += 1
                    self._far.setdefault((cell, wire, times), {})[rank] = need
                rows = rows[rows["distance"] <= 1]
            self._columns.add(needed, rows, candidates, holds)

    def _needed(self, need: int, cell: Box) -> NeededCell:
        return NeededCell(
            need,
            start=cell[0],
            shape=cell[1],
            target=relative(cell[0], self._needs[need].box[0]),
            extent=self._form.extent(cell),
            block=self._form.block,
        )

    def _far_cell(self, box: Box, wire: int, times: int) -> FarCell:
        unit = self._needed(0, box).unit
        needs = self._sides.nodes(self._far[box, wire, times])
        cell = FarCell(box, wire, self._ranks_with(box), unit if box[1] else 0, needs)
        return cell if cell.num_bytes >= self._sides.cut_bytes else dataclasses.replace(cell, unit=0)

    def _add_pieces(self, cell: FarCell, shares: PoolShares) -> None:
        """Add the transfers of a far cell."""
        candidates = np.array(cell.holders, np.int32)
        holds = np.array(list(self._holders_of(cell.box).values()), np.int32)
        rows: dict[tuple[int, Box], list[tuple[int, int, int]]] = {}
        for piece in shares.pieces(cell):
            for rank, need in zip(piece.ranks, piece.needs, strict=True):
                entry = -1 if rank == piece.entry else piece.entry
                rows.setdefault((need, piece.box), []).append((rank, piece.sender, entry))
        for (need, box), listed in rows.items():
            table = np.zeros(len(listed), _ROW)
            table["engine_rank"], table["first"], table["entry"] = np.array(listed).T
            table["count"], table["choice"], table["wire"] = 1, 0, cell.wire
            table["distance"] = self._sides.distances(candidates[table["first"]], table["engine_rank"])
            table["distance"][table["entry"] >= 0] = 1
            self._columns.add(self._needed(need, box), table, candidates, holds)

    def _rows(self, cell: Box, place: BoxPlace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        holders, engine_ranks = self._holders_of(cell), self._sides.engine_ranks[place.group]
        nearest = self._sides.nearest.of(self._ranks_with(cell))
        holds = np.array(list(holders.values()), np.int32)[nearest.positions]
        choice = nearest.of_engine[engine_ranks]
        rows = np.empty(len(engine_ranks), _ROW)
        rows["entry"] = -1
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

    def _ranks_with(self, cell: Box) -> Ranks:
        """Return the trainer ranks that hold the whole cell, one object for all its needs."""
        if cell not in self._ranks:
            self._ranks[cell] = tuple(self._holders_of(cell))
        return self._ranks[cell]

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

    def _bytes_not_on_slot(self, number: int) -> int:
        """Return the bytes of one need that are missing on its engine ranks' own slots."""
        need = self._needs[number]
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
        ("entry", np.int32),
    ]
)


class _Columns:
    """Collects the transfers of a pattern, cell by cell."""

    def __init__(self) -> None:
        self._cells: list[NeededCell] = []
        self._tables: list[np.ndarray] = []
        self._candidates: list[np.ndarray] = []
        self._holds: list[np.ndarray] = []
        self._at = 0

    def add(self, cell: NeededCell, rows: np.ndarray, candidates: np.ndarray, holds: np.ndarray) -> None:
        """Add a cell's transfers; `holds`: by candidate, the index of its box."""
        rows["first"] += self._at
        rows["cell"] = len(self._cells)
        self._cells.append(cell)
        self._tables.append(rows)
        self._candidates.append(candidates)
        self._holds.append(holds)
        self._at += len(candidates)

    def joined(self) -> dict[str, Any]:
        """Return the columns of a `Pattern`, in order of engine rank and cell."""
        table = np.concatenate([*self._tables, np.empty(0, _ROW)])
        table = table[np.lexsort((table["cell"], table["engine_rank"]))]
        counts = np.unique(table["count"]).tolist()
        return {
            "cells": tuple(self._cells),
            **{name: table[name].copy() for name in _ROW.names or () if name != "choice"},
            "turn": times_before(table["choice"]),
            "candidates": np.concatenate([*self._candidates, np.empty(0, np.int32)]),
            "holds": np.concatenate([*self._holds, np.empty(0, np.int32)]),
            "period": min(math.lcm(*counts), LONGEST_PERIOD),
        }


def _covered(box: Box, boxes: Iterable[Box]) -> int:
    """Return the number of a box's elements that the other boxes cover."""
    common = sorted({c for c in (intersection(b, box) for b in boxes) if c})
    if overlapping_boxes(common):
        return sum(math.prod(c[1]) for c in cells(box, common) if any(contains(b, c) for b in common))
    return sum(math.prod(shape) for _, shape in common)
