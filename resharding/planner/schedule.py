"""The global order of a plan: tensors cut into windows whose messages fit a bucket on every slot. Pure.

Every rank computes the same windows from the patterns alone, without other ranks' tables. Modules come in the
engine's order, with pipeline stages taking turns; within a module, tensors of different trainer ranks take
turns, so that a window loads many senders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from mrl.errors import ConfigError
from mrl.resharding.planner.manifest import Replicas, module_of
from mrl.resharding.planner.topology import Topology
from mrl.resharding.planner.transfers import WIRE_BYTES, Item, NeededCell, Pattern

ALIGN = 16
"""Bytes: messages start at multiples of it, and the bound on a bucket counts every cell rounded up to it."""

FINENESS = 4
"""Parts per bucket: one part moves at most 1/FINENESS of a bucket per slot, because coarse parts leave
buckets half full. Parts of one item in one window are joined into one copy."""
SMALLEST_GRANULE = 64 << 10
"""Bytes below which cutting only costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanStep:
    """Part `part` of `parts` of one item; parts split every cell of the item equally."""

    item: int
    part: int = 0
    parts: int = 1


Window = tuple[PlanStep, ...]


def slice_of(
    shape: tuple[int, ...], part: int, parts: int, unit: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return part `part` of a cell as (start relative to the cell, shape), or None if the part is empty.

    Cuts by rows, or by columns if rows are too few, at multiples of `unit`; else part 0 is the whole cell.

    >>> slice_of((4, 8), 1, 2)
    ((2, 0), (2, 8))
    """
    start = (0,) * len(shape)
    if parts == 1:
        return start, shape
    units = [-(-size // unit) for size in shape]
    dim = next((d for d in (0, len(shape) - 1) if shape and units[d] >= parts), None)
    if dim is None:
        return (start, shape) if part == 0 else None
    low, high = (min(p * units[dim] // parts * unit, shape[dim]) for p in (part, part + 1))
    return (
        tuple(low if d == dim else 0 for d in range(len(shape))),
        tuple(high - low if d == dim else size for d, size in enumerate(shape)),
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Bytes between slots for a part of an item. Lane `slot` sends; lane `num_slots + slot` receives."""

    endpoints: np.ndarray
    num_bytes: np.ndarray

    @property
    def most(self) -> int:
        """Bytes that the busiest slot sends or receives."""
        return int(self.num_bytes.max(initial=0))


class _RemoteTransfers:
    """A pattern's transfers from slot to slot by messages, with an entry per lane."""

    def __init__(
        self, pattern: Pattern, trainer_lanes: np.ndarray, engine_lanes: np.ndarray, reach: int
    ) -> None:
        remote = np.flatnonzero((pattern.distance > reach) & (pattern.entry < 0))
        self._cells = pattern.cells
        self._cell, self._bytes = pattern.cell[remote], WIRE_BYTES[pattern.wire[remote]]
        self._first, self._count, self._turn = (
            column[remote] for column in (pattern.first, pattern.count, pattern.turn)
        )
        lanes = np.concatenate([engine_lanes[pattern.engine_rank[remote]], trainer_lanes[pattern.candidates]])
        self._lanes, entry = np.unique(lanes, return_inverse=True)
        self._receiver, self._candidate = np.split(entry, [len(remote)])
        self._parts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def flow(self, ordinal: int, part: int, parts: int) -> Flow:
        if (part, parts) not in self._parts:
            self._parts[part, parts] = self._received(part, parts)
        sizes, received = self._parts[part, parts]
        senders = self._candidate[self._first + (self._turn + ordinal) % self._count]
        sent = np.bincount(senders, sizes, minlength=len(self._lanes))
        return Flow(self._lanes, (sent + received).astype(np.int64))

    def _received(self, part: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of each transfer and of each entry."""
        elements = np.array([_elements(cell, part, parts) for cell in self._cells], np.int64)
        sizes = -(-elements[self._cell] * self._bytes // ALIGN) * ALIGN
        return sizes, np.bincount(self._receiver, sizes, minlength=len(self._lanes))


class SlotTraffic:
    """Bytes each slot sends and receives in messages for an item; every cell is rounded up to ALIGN."""

    def __init__(self, topology: Topology, *, reach: int = 0) -> None:
        """`reach`: the distance up to which engine ranks read trainer memory."""
        self._reach = reach
        self.num_endpoints = 2 * topology.num_slots
        self._trainer_lanes = np.array(topology.trainer_slots, int)
        self._engine_lanes = np.array(topology.engine_slots, int) + topology.num_slots
        self._remote: dict[int, _RemoteTransfers] = {}

    def of(self, pattern: Pattern, ordinal: int, part: int = 0, parts: int = 1) -> Flow:
        """Return the flow of one part of an item of this pattern and ordinal."""
        if id(pattern) not in self._remote:
            self._remote[id(pattern)] = _RemoteTransfers(
                pattern, self._trainer_lanes, self._engine_lanes, self._reach
            )
        return self._remote[id(pattern)].flow(ordinal, part, parts)


def _elements(cell: NeededCell, part: int, parts: int) -> int:
    cut = slice_of(cell.shape, part, parts, cell.unit)
    return math.prod(cut[1]) if cut else 0


def ordered_steps(
    items: Sequence[Item],
    parts: Sequence[int],
    trainers: Sequence[Replicas],
    engines: Sequence[Replicas],
    *,
    interleave_stages: bool,
) -> list[PlanStep]:
    """Return all parts of all items in the plan's global order.

    Stages take turns by the share of their bytes that came before: module by module, or with
    `interleave_stages` part by part."""
    modules: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        place = item.needs[0]
        modules.setdefault(module_of(engines[place.group].tensors[place.index].name), []).append(number)
    lowest = [min(trainers[place.group].ranks[0] for place in item.holds) for item in items]
    lane = [(rank, items[n].needs[0].group) for n, rank in enumerate(lowest)]
    stages: dict[int, list[list[int]]] = {}
    for numbers in modules.values():
        stages.setdefault(min(lowest[n] for n in numbers), []).append(numbers)
    num_bytes = {key: int(p.sizes.sum()) for key, p in {id(i.pattern): i.pattern for i in items}.items()}
    keyed: list[tuple[float, int, list[PlanStep]]] = []
    for stage, listed in stages.items():
        sizes = [sum(num_bytes[id(items[n].pattern)] for n in numbers) for numbers in listed]
        done, whole = 0, sum(sizes) or 1
        for numbers, size in zip(listed, sizes, strict=True):
            turns = _round_robin(numbers, parts, lane)
            if not interleave_stages:
                keyed.append((done / whole, stage, turns))
            else:
                for place, step in enumerate(turns):
                    keyed.append(((done + size * place / len(turns)) / whole, stage, [step]))
            done += size
    return [step for _, _, steps in sorted(keyed, key=lambda entry: entry[:2]) for step in steps]


def _round_robin(
    numbers: Sequence[int], parts: Sequence[int], lane_of: Sequence[tuple[int, int]]
) -> list[PlanStep]:
    """Take parts of different trainer and engine ranks in turn, longer lanes more often: all end together."""
    lanes: dict[tuple[int, int], list[PlanStep]] = {}
    for number in numbers:
        steps = (PlanStep(number, part, parts[number]) for part in range(parts[number]))
        lanes.setdefault(lane_of[number], []).extend(steps)
    keyed = [
        ((2 * place + 1) / (2 * len(lane)), key, step)
        for key, lane in lanes.items()
        for place, step in enumerate(lane)
    ]
    return [step for _, _, step in sorted(keyed, key=lambda entry: entry[:2])]


def cut_counts(items: Sequence[Item], traffic: SlotTraffic, *, bucket_bytes: int) -> list[int]:
    """Return the number of parts of each item; raise ConfigError if one row does not fit a bucket."""
    parts: dict[tuple[int, int], int] = {}
    counts = []
    for item in items:
        key = (id(item.pattern), item.ordinal)
        if key not in parts:
            parts[key] = _parts(item, traffic, bucket_bytes)
        counts.append(parts[key])
    return counts


def fill_windows(
    items: Sequence[Item], order: Iterable[PlanStep], traffic: SlotTraffic, *, bucket_bytes: int
) -> list[Window]:
    """Group steps in order, so that no slot sends or receives more than bucket_bytes in a window."""
    result: list[Window] = []
    steps: list[PlanStep] = []
    total = np.zeros(traffic.num_endpoints, dtype=np.int64)
    for step in order:
        item = items[step.item]
        flow = traffic.of(item.pattern, item.ordinal, step.part, step.parts)
        grown = total[flow.endpoints] + flow.num_bytes
        if steps and grown.max(initial=0) > bucket_bytes:
            result.append(tuple(steps))
            steps, grown = [], flow.num_bytes
            total[:] = 0
        steps.append(step)
        total[flow.endpoints] = grown
    if steps:
        result.append(tuple(steps))
    return result


def _parts(item: Item, traffic: SlotTraffic, bucket_bytes: int) -> int:
    pattern, ordinal = item.pattern, item.ordinal
    need = traffic.of(pattern, ordinal).most
    granule = min(bucket_bytes, max(bucket_bytes // FINENESS, SMALLEST_GRANULE))
    if need <= granule:
        return 1
    parts = -(-need // granule)
    limit = max((max(cell.shape, default=1) for cell in pattern.cells), default=1)
    while any(traffic.of(pattern, ordinal, part, parts).most > bucket_bytes for part in range(parts)):
        if parts > limit:
            raise ConfigError(
                f"{item.tensor} cannot be cut to fit a bucket of {bucket_bytes} bytes; use at least {need} "
                "bytes"
            )
        parts = parts + max(1, parts // 8)
    return parts
