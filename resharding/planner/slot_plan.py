"""One slot's part of a plan, by window: copies on the slot, packing for peers and unpacking from them. Pure.

A slot runs its windows in order. Each one: `local` from trainers' memory to the engine's; `pack` into the
send bucket, then one message per peer; `unpack` from the receive bucket into the engine. Both ends of a
message walk the same transfers in the same order, so its layout is the same on both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mrl.errors import WeightSyncError
from mrl.models.tensors import LocalTensor
from mrl.resharding.planner.boxes import Box
from mrl.resharding.planner.copy_table import BUCKET, COPY, CopyList, CopyTable, Side
from mrl.resharding.planner.manifest import Replicas, module_of
from mrl.resharding.planner.need_forms import BoxPlace
from mrl.resharding.planner.schedule import ALIGN, PlanStep, Window, slice_of
from mrl.resharding.planner.topology import Topology
from mrl.resharding.planner.transfers import WIRE_BYTES, Item, Transfer


@dataclasses.dataclass(frozen=True, slots=True)
class SlotMessage:
    """`num_bytes` bytes at `offset` of this slot's send (receive) bucket, to (from) slot `peer`."""

    peer: int
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class EngineWindow:
    """Work of a slot's engine rank in one window; any of it may be empty."""

    local: CopyTable
    """Tensors of the lenders -> engine tensors, ordered by module."""
    unpack: CopyTable
    """Receive bucket -> engine tensors, ordered by module."""
    opens: tuple[int, ...]
    """Modules whose first bytes arrive on this slot in this window (indices into SlotPart.modules)."""
    closes: tuple[int, ...]
    """Modules that are complete on this slot after this window."""
    bucket_bytes: int
    """Bytes filled in the receive bucket."""


@dataclasses.dataclass(frozen=True, slots=True)
class WindowPart(EngineWindow):
    """Work of one slot in one window; any of it may be empty."""

    index: int
    pack: CopyTable
    """Trainer tensors -> send bucket."""
    sends: tuple[SlotMessage, ...]
    receives: tuple[SlotMessage, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SlotPart:
    """One slot's part. Tables index tensors by position in `trainer_tensors` and `engine_tensors`; `local`
    reads by position among the tensors of all `lenders`, one lender after the other, and then among the
    receive buckets of all `neighbours`, each seen as an array of every wire dtype in turn."""

    slot: int
    trainer_rank: int | None
    engine_rank: int | None
    trainer_tensors: tuple[LocalTensor, ...]
    engine_tensors: tuple[LocalTensor, ...]
    modules: tuple[str, ...]
    windows: tuple[WindowPart, ...]
    lenders: tuple[int, ...]
    """Trainer ranks whose memory the engine rank reads, its own slot's first."""
    num_sources: int
    """Number of tensors of all lenders."""
    neighbours: tuple[int, ...] = ()
    """Engine ranks of the node from whose receive buckets the engine rank copies."""

    @property
    def send_bucket_bytes(self) -> int:
        """Bytes of the send bucket that the slot needs at most."""
        return max((_end(window.sends) for window in self.windows), default=0)


def _end(messages: Sequence[SlotMessage]) -> int:
    return messages[-1].offset + messages[-1].num_bytes if messages else 0


class PartBuilder:
    """Builds the part of one slot."""

    def __init__(
        self,
        slot: int,
        items: Sequence[Item],
        trainers: Sequence[Replicas],
        engines: Sequence[Replicas],
        topology: Topology,
        *,
        reach: int,
    ) -> None:
        """`reach`: the distance up to which the engine rank reads trainer memory."""
        self._slot, self._items, self._topology, self._reach = slot, items, topology, reach
        self._trainers = trainers
        self._trainer_rank = _index(topology.trainer_slots, slot)
        self._engine_rank = _index(topology.engine_slots, slot)
        self._trainer_tensors = _tensors(trainers, self._trainer_rank)
        self._arrivals = _Arrivals(items, topology)
        self._neighbours: list[int] = []
        self._lent: dict[int, tuple[int, tuple[LocalTensor, ...]]] = {}
        if self._trainer_rank is not None:
            self._lent[self._trainer_rank] = 0, self._trainer_tensors
        self._engine_tensors = _tensors(engines, self._engine_rank)
        self._mine: dict[tuple[int, int], list[Transfer]] = {}
        names = [module_of(tensor.name) for tensor in self._engine_tensors]
        self._modules = tuple(dict.fromkeys(names))
        numbers = {name: number for number, name in enumerate(self._modules)}
        self._module_of = [numbers[name] for name in names]

    def build(self, windows: Sequence[Window]) -> SlotPart:
        drafts = [self._window(number, window) for number, window in enumerate(windows)]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, draft in enumerate(drafts):
            for module in draft.touched:
                first.setdefault(module, number)
                last[module] = number
        parts = [
            draft.finish(
                number,
                num_sources=self._num_sources,
                opens=tuple(sorted(m for m in draft.touched if first[m] == number)),
                closes=tuple(sorted(m for m in draft.touched if last[m] == number)),
            )
            for number, draft in enumerate(drafts)
        ]
        return SlotPart(
            self._slot,
            self._trainer_rank,
            self._engine_rank,
            self._trainer_tensors,
            self._engine_tensors,
            self._modules,
            tuple(parts),
            tuple(self._lent),
            self._num_sources,
            tuple(self._neighbours),
        )

    @property
    def _num_sources(self) -> int:
        return sum(len(tensors) for _, tensors in self._lent.values())

    def _lent_by(self, trainer_rank: int) -> tuple[int, tuple[LocalTensor, ...]]:
        """Return (index of its first tensor among all lenders', its tensors)."""
        if trainer_rank not in self._lent:
            self._lent[trainer_rank] = self._num_sources, _tensors(self._trainers, trainer_rank)
        return self._lent[trainer_rank]

    def _window(self, number: int, window: Window) -> _Draft:
        draft = _Draft(number, window)
        for step in window:
            item = self._items[step.item]
            for transfer in self._transfers(item):
                self._add(draft, item, step, transfer)
        return draft

    def _transfers(self, item: Item) -> list[Transfer]:
        """Return an item's transfers that the slot sends or receives."""
        key = (id(item.pattern), item.ordinal)
        if key not in self._mine:
            self._mine[key] = item.pattern.of_ranks(self._trainer_rank, self._engine_rank, item.ordinal)
        return self._mine[key]

    def _add(self, draft: _Draft, item: Item, step: PlanStep, transfer: Transfer) -> None:
        receiving = transfer.engine_rank == self._engine_rank
        sender = self._topology.trainer_slots[transfer.sender]
        receiver = self._topology.engine_slots[transfer.engine_rank]
        lent = self._topology.distance(sender, receiver) <= self._reach
        cell = transfer.cell
        cut = slice_of(cell.shape, step.part, step.parts, cell.unit)
        if cut is None or (lent and not receiving):
            return
        start, shape = cut
        size, wire, block = _matrix(shape), transfer.wire, cell.block
        if not receiving:
            read_at, read = self._reads(item, transfer, cut, 0, self._trainer_tensors)
            draft.sends.setdefault(receiver, _Stream()).pack(read_at, read, size, wire, block)
            return
        place = item.needs[cell.need]
        target = tuple(a + b for a, b in zip(cell.target, start, strict=True))
        write_at, module = _side(place, self._engine_tensors, target), self._module_of[place.index]
        draft.touched.add(module)
        if lent:
            read_at, (rows, cols) = self._reads(item, transfer, cut, *self._lent_by(transfer.sender))
            draft.local.add(read_at, write_at, rows=rows, cols=cols, wire=wire, module=module, block=block)
        elif transfer.entry >= 0:
            read_at = (*self._taken_in(draft, step, transfer), size[1])
            draft.local.add(read_at, write_at, rows=size[0], cols=size[1], wire=wire, module=module)
        else:
            draft.receives.setdefault(sender, _Stream()).unpack(write_at, size, wire, module)

    def _taken_in(self, draft: _Draft, step: PlanStep, transfer: Transfer) -> tuple[int, int]:
        """Return (index of a bucket's array, below `BUCKET`; offset in it) of what another rank takes in."""
        if transfer.entry not in self._neighbours:
            self._neighbours.append(transfer.entry)
        array = self._neighbours.index(transfer.entry) * len(WIRE_BYTES) + transfer.wire
        offsets = self._arrivals.offsets(draft.number, draft.window, transfer.entry)
        return BUCKET - 1 - array, offsets[_key(step, transfer)]

    @staticmethod
    def _reads(
        item: Item, transfer: Transfer, cut: Box, first: int, tensors: Sequence[LocalTensor]
    ) -> tuple[Side, tuple[int, int]]:
        """Return (start in the sender's tensors, numbered from `first`; rows, columns) of a cell's part."""
        start, shape = transfer.trainer_box(*cut)
        origin = tuple(a + b for a, b in zip(transfer.origin, start, strict=True))
        index, offset, stride = _side(item.holds[transfer.hold], tensors, origin)
        return (first + index, offset, stride), _matrix(shape)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a scalar, a vector, a matrix, or a box of whole rows of more dimensions."""
    rows, cols = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape[0] if shape else 1)
    return rows, cols


def _index(slots: Sequence[int], slot: int) -> int | None:
    return slots.index(slot) if slot in slots else None


def _tensors(groups: Sequence[Replicas], rank: int | None) -> tuple[LocalTensor, ...]:
    return next((group.tensors for group in groups if rank in group.ranks), ())


def _side(place: BoxPlace, tensors: Sequence[LocalTensor], relative: tuple[int, ...]) -> Side:
    """Return (tensor index, offset, stride) of the element `relative` of a place's box."""
    shape, start = tensors[place.index].shape, place.piece.local_start
    wide = place.piece.shape[1:]
    if len(relative) > 2 and (any(relative[1:]) or wide != shape[-len(wide) :]):
        raise WeightSyncError(
            f"{place.piece.tensor} has {len(relative)} dimensions; plans cut tensors of more than two only "
            "by rows"
        )
    extra = len(start) - len(relative)
    offset, step = 0, 1
    for dim in range(len(shape) - 1, -1, -1):
        at = start[dim] + (relative[dim - extra] if dim >= extra else 0)
        offset += at * step
        step *= shape[dim]
    return place.index, offset, math.prod(shape[-max(1, len(relative) - 1) :])


def _key(step: PlanStep, transfer: Transfer) -> tuple[int, int, Box]:
    """Return what names the bytes of a transfer in a node, whoever needs them for which tensor."""
    return step.item, step.part, (transfer.cell.start, transfer.cell.shape)


class _Arrivals:
    """Places in the receive buckets of other engine ranks, which their own parts lay out in the same way."""

    def __init__(self, items: Sequence[Item], topology: Topology) -> None:
        self._items, self._slots = items, topology.trainer_slots
        self._mine: dict[tuple[int, int, int], list[Transfer]] = {}
        self._known: dict[int, tuple[int, dict[tuple[int, int, Box], int]]] = {}
        """By engine rank: the last window and its offsets."""

    def offsets(self, number: int, window: Window, engine_rank: int) -> dict[tuple[int, int, Box], int]:
        """Return the offsets, in elements of the wire dtype, of what an engine rank receives in a window."""
        known = self._known.get(engine_rank)
        if known is None or known[0] != number:
            known = self._known[engine_rank] = number, self._laid_out(window, engine_rank)
        return known[1]

    def _laid_out(self, window: Window, engine_rank: int) -> dict[tuple[int, int, Box], int]:
        streams: dict[int, _Stream] = {}
        places: list[tuple[tuple[int, int, Box], int, int, int]] = []
        for step in window:
            item = self._items[step.item]
            for transfer in self._received(item, engine_rank):
                cell = transfer.cell
                cut = slice_of(cell.shape, step.part, step.parts, cell.unit)
                if cut is not None:
                    slot = self._slots[transfer.sender]
                    at = streams.setdefault(slot, _Stream()).reserve(*_matrix(cut[1]), transfer.wire)[1]
                    places.append((_key(step, transfer), slot, transfer.wire, at))
        starts = _starts(streams)
        return {key: starts[slot] // int(WIRE_BYTES[wire]) + at for key, slot, wire, at in places}

    def _received(self, item: Item, engine_rank: int) -> list[Transfer]:
        key = (engine_rank, id(item.pattern), item.ordinal)
        if key not in self._mine:
            transfers = item.pattern.of_ranks(None, engine_rank, item.ordinal)
            self._mine[key] = [t for t in transfers if t.entry < 0]
        return self._mine[key]


class _Stream:
    """Copies of one message, with offsets relative to its start."""

    def __init__(self) -> None:
        self.copies = CopyList()
        self._cursor = 0

    @property
    def num_bytes(self) -> int:
        return -(-self._cursor // ALIGN) * ALIGN

    def pack(self, held: Side, read: tuple[int, int], size: tuple[int, int], wire: int, block: int) -> None:
        place = self.reserve(*size, wire)
        self.copies.add(held, place, rows=read[0], cols=read[1], wire=wire, module=-1, block=block)

    def unpack(self, needed: Side, size: tuple[int, int], wire: int, module: int) -> None:
        place = self.reserve(*size, wire)
        self.copies.add(place, needed, rows=size[0], cols=size[1], wire=wire, module=module)

    def reserve(self, rows: int, cols: int, wire: int) -> Side:
        """Take the next place for an array of this dtype; return its side in the bucket."""
        size = int(WIRE_BYTES[wire])
        at = -(-self._cursor // size)
        self._cursor = (at + rows * cols) * size
        return BUCKET, at, cols


class _Draft:
    """One window of one slot while it is being collected."""

    def __init__(self, number: int, window: Window) -> None:
        self.number, self.window = number, window
        self.local = CopyList()
        self.sends: dict[int, _Stream] = {}
        self.receives: dict[int, _Stream] = {}
        self.touched: set[int] = set()

    def finish(
        self, index: int, *, num_sources: int, opens: tuple[int, ...], closes: tuple[int, ...]
    ) -> WindowPart:
        """`num_sources`: the number of leased tensors, after which the arrays of other buckets follow."""
        local = _by_module(self.local.table())
        taken = local["source"] < BUCKET
        local["source"][taken] = num_sources + BUCKET - 1 - local["source"][taken]
        pack, sends = _laid_out(self.sends, "target_offset")
        unpack, receives = _laid_out(self.receives, "source_offset")
        return WindowPart(
            index=index,
            local=local,
            pack=pack,
            sends=sends,
            unpack=_by_module(unpack),
            receives=receives,
            opens=opens,
            closes=closes,
            bucket_bytes=_end(receives),
        )


def _laid_out(streams: dict[int, _Stream], side: str) -> tuple[CopyTable, tuple[SlotMessage, ...]]:
    """Put all streams one after another in the bucket, in order of peer."""
    if not streams:
        return np.empty(0, COPY), ()
    tables, messages = [], []
    for peer, start in _starts(streams).items():
        table = streams[peer].copies.table()
        table[side] += start // WIRE_BYTES[table["wire"]]
        tables.append(table)
        messages.append(SlotMessage(peer, start, streams[peer].num_bytes))
    return np.concatenate(tables), tuple(messages)


def _starts(streams: dict[int, _Stream]) -> dict[int, int]:
    """Return the first byte of every stream in the bucket, in order of peer."""
    starts, base = {}, 0
    for peer, stream in sorted(streams.items()):
        starts[peer] = base
        base += stream.num_bytes
    return starts


def _by_module(table: CopyTable) -> CopyTable:
    return table[np.argsort(table["module"], kind="stable")]
