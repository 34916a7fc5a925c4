"""Transfers from the trainers' pool into nodes of the engines' pool: every link carries its share. Pure.

A cell is cut, so that each trainer rank that holds it sends its share, and each engine rank that takes it in
for its node receives its share. Both shares are the same for all tensors of a class, so links are busy all
the time, and any rank computes any cut alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mrl.resharding.planner.boxes import Box
from mrl.resharding.planner.even_shares import Ranks, cut, even_shares
from mrl.resharding.planner.transfers import WIRE_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class FarCell:
    """A cell that comes from other nodes, in the need's units, with the engine ranks that need it."""

    box: Box
    wire: int
    holders: Ranks
    """Trainer ranks that hold it."""
    unit: int
    """Rows at whose multiples it may be cut; 0 if it stays whole."""
    needs: Sequence[tuple[Ranks, Sequence[int]]]
    """By node: the engine ranks that need it, one of which takes each byte in for all; and their needs."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.box[1]) * int(WIRE_BYTES[self.wire])

    @property
    def units(self) -> int:
        return -(-self.box[1][0] // self.unit) if self.unit else 1

    def part(self, low: int, high: int) -> Box:
        """Return the box of its units from `low` to `high`."""
        if not self.unit:
            return self.box
        (start, *starts), (rows, *sizes) = self.box
        first, end = low * self.unit, min(high * self.unit, rows)
        return (start + first, *starts), (end - first, *sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a far cell on their way into one node: who sends them and who takes them in."""

    box: Box
    sender: int
    """Position among the cell's holders."""
    entry: int
    """Engine rank that gets it by message; the node's others copy it from that rank's receive bucket."""
    ranks: Ranks
    """Engine ranks of the node that need it."""
    needs: Sequence[int]


class PoolShares:
    """Shares of all trainer ranks in sending, and of all engine ranks in taking in, for a whole sync."""

    def __init__(self, classes: Iterable[tuple[Sequence[FarCell], int]]) -> None:
        """`classes`: the far cells of a class of tensors, and the number of its tensors."""
        sent: Counter[Ranks] = Counter()
        taken: Counter[Ranks] = Counter()
        for far_cells, count in classes:
            for cell in far_cells:
                sent[cell.holders] += cell.num_bytes * count * len(cell.needs)
                for ranks, _ in cell.needs:
                    taken[ranks] += cell.num_bytes * count
        self._sent, self._taken = even_shares(sent), even_shares(taken)

    def pieces(self, cell: FarCell) -> Iterator[Piece]:
        """Cut one cell for all its nodes, which lie side by side in a row that the senders share."""
        units, sends = cell.units, cut(cell.units, len(cell.needs), self._sent[cell.holders])
        for node, (ranks, needs) in enumerate(cell.needs):
            takes = cut(units, 1, self._taken[ranks])
            inside = sends[(sends > node * units) & (sends < (node + 1) * units)] - node * units
            for low, high in itertools.pairwise(np.unique(np.concatenate([takes, inside])).tolist()):
                yield Piece(
                    cell.part(low, high),
                    sender=int(np.searchsorted(sends, node * units + low, side="right")) - 1,
                    entry=ranks[int(np.searchsorted(takes, low, side="right")) - 1],
                    ranks=ranks,
                    needs=needs,
                )
