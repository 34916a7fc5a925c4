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
    reads by position among the tensors of all `lenders`, one lender after the other."""

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
        drafts = [self._window(window) for window in windows]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, draft in enumerate(drafts):
            for module in draft.touched:
                first.setdefault(module, number)
                last[module] = number
        parts = [
            draft.finish(
                number,
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
        )

    @property
    def _num_sources(self) -> int:
        return sum(len(tensors) for _, tensors in self._lent.values())

    def _lent_by(self, trainer_rank: int) -> tuple[int, tuple[LocalTensor, ...]]:
        """Return (index of its first tensor among all lenders', its tensors)."""
        if trainer_rank not in self._lent:
            self._lent[trainer_rank] = self._num_sources, _tensors(self._trainers, trainer_rank)
        return self._lent[trainer_rank]

    def _window(self, window: Window) -> _Draft:
        draft = _Draft()
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
        else:
            draft.receives.setdefault(sender, _Stream()).unpack(write_at, size, wire, module)

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


class _Stream:
    """Copies of one message, with offsets relative to its start."""

    def __init__(self) -> None:
        self.copies = CopyList()
        self._cursor = 0

    @property
    def num_bytes(self) -> int:
        return -(-self._cursor // ALIGN) * ALIGN

    def pack(self, held: Side, read: tuple[int, int], size: tuple[int, int], wire: int, block: int) -> None:
        place = self._reserve(*size, wire)
        self.copies.add(held, place, rows=read[0], cols=read[1], wire=wire, module=-1, block=block)

    def unpack(self, needed: Side, size: tuple[int, int], wire: int, module: int) -> None:
        place = self._reserve(*size, wire)
        self.copies.add(place, needed, rows=size[0], cols=size[1], wire=wire, module=module)

    def _reserve(self, rows: int, cols: int, wire: int) -> Side:
        size = int(WIRE_BYTES[wire])
        at = -(-self._cursor // size)
        self._cursor = (at + rows * cols) * size
        return BUCKET, at, cols


class _Draft:
    """One window of one slot while it is being collected."""

    def __init__(self) -> None:
        self.local = CopyList()
        self.sends: dict[int, _Stream] = {}
        self.receives: dict[int, _Stream] = {}
        self.touched: set[int] = set()

    def finish(self, index: int, *, opens: tuple[int, ...], closes: tuple[int, ...]) -> WindowPart:
        pack, sends = _laid_out(self.sends, "target_offset")
        unpack, receives = _laid_out(self.receives, "source_offset")
        return WindowPart(
            index=index,
            local=_by_module(self.local.table()),
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
    tables, messages, base = [], [], 0
    for peer, stream in sorted(streams.items()):
        table = stream.copies.table()
        table[side] += base // WIRE_BYTES[table["wire"]]
        tables.append(table)
        messages.append(SlotMessage(peer, base, stream.num_bytes))
        base += stream.num_bytes
    return np.concatenate(tables), tuple(messages)


def _by_module(table: CopyTable) -> CopyTable:
    return table[np.argsort(table["module"], kind="stable")]
