"""The peer lane inside a machine: a trainer packs its messages straight into the receive buckets of its
neighbours' slots.

Buckets are shared memory, so nothing is sent and no send bucket is needed: a byte from a neighbour is written
twice, into the bucket and out of it. Owns which messages go this way and the mappings; who may write when is
the session's (`planned`): every bucket is free before anyone packs, and announced when everyone has packed.
Not used on GPUs, where the group's own transport is in the node what this is between processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mrl.resharding.planner.copy_table import CopyTable
from mrl.resharding.planner.patterns import WIRE_BYTES
from mrl.resharding.planner.slot_plan import SlotPart, WindowPart
from mrl.resharding.transfer.collectives import Ranks
from mrl.resharding.transfer.copies import run
from mrl.resharding.transfer.planned import Lane
from mrl.resharding.wire import memory


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a rank tells the others: its two receive buckets, and where each slot's message goes in every
    window."""

    buckets: tuple[dict[str, Any], ...]
    """`Segment.export`."""
    places: tuple[Mapping[int, int], ...]
    """By window: sending slot -> byte offset in the receive bucket."""

    @classmethod
    def of(cls, part: SlotPart, buckets: Sequence[dict[str, Any]]) -> Offer:
        places = tuple({r.peer: r.offset for r in window.receives} for window in part.windows)
        return cls(tuple(buckets), places)


def split(window: WindowPart, places: Mapping[int, int]) -> tuple[dict[int, CopyTable], WindowPart]:
    """(pack tables into neighbours' receive buckets by neighbour, what is left of the window for the group).

    `places`: neighbouring slot -> where this slot's message starts in its bucket, also for those that get
    none.
    """
    sizes = WIRE_BYTES[window.pack["wire"]]
    at = window.pack["target_offset"] * sizes
    left = np.ones(len(at), dtype=bool)
    tables: dict[int, CopyTable] = {}
    for message in window.sends:
        if message.peer in places:
            mine = (at >= message.offset) & (at < message.offset + message.num_bytes)
            table = window.pack[mine].copy()
            table["target_offset"] += (places[message.peer] - message.offset) // sizes[mine]
            tables[message.peer] = table
            left &= ~mine
    rest = dataclasses.replace(
        window,
        pack=window.pack[left],
        sends=tuple(m for m in window.sends if m.peer not in places),
        receives=tuple(m for m in window.receives if m.peer not in places),
    )
    return tables, rest


class Neighbours:
    """One trainer rank's mappings of its neighbours' buckets, opened once."""

    def __init__(self, part: SlotPart, offers: Mapping[int, Offer]) -> None:
        """`offers`: of every other slot of this machine."""
        self._tables: list[dict[int, CopyTable]] = []
        windows = []
        for number, window in enumerate(part.windows):
            places = {slot: offer.places[number].get(part.slot, 0) for slot, offer in offers.items()}
            tables, rest = split(window, places)
            self._tables.append(tables)
            windows.append(rest)
        self.rest = dataclasses.replace(part, windows=tuple(windows))
        """The part without what goes this way."""
        used = {slot for tables in self._tables for slot in tables}
        self._buckets = {
            slot: [memory.open_segment(bucket) for bucket in offer.buckets]
            for slot, offer in offers.items()
            if slot in used
        }

    def pack(self, turn: int, arrays: Sequence[torch.Tensor]) -> None:
        """Writes this rank's messages of a window; all its receivers' buckets must be free."""
        for slot, table in self._tables[turn].items():
            run(table, arrays, self._buckets[slot][turn % 2].buffer)

    def close(self) -> None:
        buckets, self._buckets = self._buckets, {}
        for bucket in (b for pair in buckets.values() for b in pair):
            bucket.close()


class NodeLane:
    """Messages to neighbours go into their buckets, the rest by another lane (`planned.Lane`, over
    `Neighbours.rest`)."""

    def __init__(
        self, neighbours: Neighbours, rest: Lane, ranks: Ranks, arrays: Sequence[torch.Tensor]
    ) -> None:
        """`arrays`: this rank's trainer tensors, flat."""
        self._neighbours, self._rest, self._ranks, self._arrays = neighbours, rest, ranks, arrays

    def bucket(self, turn: int) -> torch.Tensor:
        return self._rest.bucket(turn)

    def start(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        self._ranks.together(lambda: self._neighbours.pack(turn, self._arrays))
        self._rest.start(turn, window, received)

    def finish(self, turn: int) -> None:
        self._rest.finish(turn)

    def drain(self) -> None:
        self._rest.drain()
