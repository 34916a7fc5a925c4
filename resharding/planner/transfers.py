"""Who sends what to whom: one pattern of transfers for all checkpoint tensors of a class. Pure.

Tensors that the same ranks hold and need in the same boxes form a class (for example the experts of one
expert-parallel rank in one pipeline stage); its pattern is computed once. The sender of a cell is a closed
form of the pattern and the tensor's ordinal in its class, so every rank knows any choice without a search. A
pattern of thousands of slots has as many transfers: columns, of which only one slot's become objects.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from mrl.resharding.planner.boxes import Box
from mrl.resharding.planner.manifest import DTYPE_BYTES, WIRE_DTYPES
from mrl.resharding.planner.need_forms import BoxPlace, PlainForm
from mrl.resharding.planner.quantised import Blocks

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
    entry: int
    """Engine rank of the same node that gets the cell by message, and from whose receive bucket the engine
    rank copies it; -1 if the sender sends it to the engine rank itself."""

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
    entry: np.ndarray
    """As `Transfer.entry`."""
    candidates: np.ndarray
    """Trainer ranks."""
    holds: np.ndarray
    """By candidate, the index of its box among the tensor's holdings."""
    period: int
    """Ordinals are taken modulo this period."""
    bytes_not_on_slot: int
    """Bytes that engine ranks need and their own slot lacks, from the boxes alone (lower bound)."""
    form: PlainForm
    uncut: tuple[NeededCell, ...]
    """Cells before they are cut for several senders: those that a proof compares."""
    uncut_needs: tuple[np.ndarray, np.ndarray]
    """Engine ranks, and by each the index into `uncut` of a cell that it needs."""
    uncut_holders: tuple[tuple[int, ...], ...]
    """By uncut cell, the trainer ranks that hold it."""

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

    def of_ranks(self, trainer_rank: int | None, engine_rank: int | None, ordinal: int) -> list[Transfer]:
        """Return what a trainer rank sends and an engine rank receives of the tensor with this ordinal."""
        chosen = self._chosen(ordinal)
        sent = (self.candidates[chosen] == trainer_rank) & (self.entry < 0)
        selected = sent | (self.engine_rank == engine_rank)
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
            entry=int(self.entry[number]),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint tensor that some engine rank needs."""

    tensor: str
    holds: tuple[BoxPlace, ...]
    needs: tuple[BoxPlace, ...]
    pattern: Pattern
    ordinal: int
