"""The global order of a plan: checkpoint tensors cut into windows whose messages fit a bucket on every slot.
Pure.

Every rank computes the same windows from the patterns alone; none needs another rank's tables. Order: module
by module as the engine lists them, pipeline stages taking turns; inside a module, tensors of different
trainer ranks take turns, so that a window loads many senders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from mrl.errors import ConfigError
from mrl.resharding.planner.manifest import DTYPE_BYTES, WIRE_DTYPES, module_of
from mrl.resharding.planner.patterns import Item, Pattern, Replicas
from mrl.resharding.planner.topology import Topology

ALIGN = 16
"""Bytes: messages start on it, and the bound on a bucket counts every cell rounded up to it."""

FINENESS = 4
"""An item is cut so that no slot moves more than this share of a bucket for one part: coarse parts leave
buckets half full. Parts of one item that stay in one window join again into one copy."""
SMALLEST_GRANULE = 64 << 10
"""Bytes below which cutting only costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Part `part` of `parts` of one item; parts split every cell of the item alike."""

    item: int
    part: int = 0
    parts: int = 1


Window = tuple[Step, ...]


def slice_of(
    shape: tuple[int, ...], part: int, parts: int, unit: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Part `part` of a cell as (start relative to the cell, shape): by rows, or by columns where there are
    too few rows. A cell too small for either goes whole with part 0; None where a part is empty. Cuts are at
    multiples of `unit`.

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


class SlotTraffic:
    """Bytes each slot sends and receives for an item, by pattern and ordinal; computed once per pair."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._counts: dict[tuple[int, int, int, int], np.ndarray] = {}

    def of(self, pattern: Pattern, ordinal: int, part: int = 0, parts: int = 1) -> np.ndarray:
        """[2, slots] bytes between slots, every cell rounded up to ALIGN: row 0 sent, row 1 received."""
        key = (id(pattern), ordinal, part, parts)
        if key not in self._counts:
            self._counts[key] = self._count(pattern, ordinal, part, parts)
        return self._counts[key]

    def _count(self, pattern: Pattern, ordinal: int, part: int, parts: int) -> np.ndarray:
        counts = np.zeros((2, self._topology.num_slots), dtype=np.int64)
        for transfer in pattern.transfers:
            cut = slice_of(transfer.shape, part, parts, transfer.unit)
            if transfer.distance == 0 or cut is None:
                continue
            size = int(np.prod(cut[1])) * DTYPE_BYTES[WIRE_DTYPES[transfer.wire]]
            size = -(-size // ALIGN) * ALIGN
            sender = transfer.candidates[transfer.chosen(ordinal)]
            counts[0, self._topology.trainer_slots[sender]] += size
            counts[1, self._topology.engine_slots[transfer.engine_rank]] += size
        return counts


def _module_of_item(item: Item, engines: Sequence[Replicas]) -> str:
    """The engine's module that the item's first need belongs to."""
    place = item.needs[0]
    return module_of(engines[place.group].tensors[place.index].name)


def ordered(
    items: Sequence[Item],
    parts: Sequence[int],
    trainers: Sequence[Replicas],
    engines: Sequence[Replicas],
    *,
    interleave_stages: bool,
) -> list[Step]:
    """All parts of all items in the plan's global order: each stage's modules in turn by the share of its
    bytes that went before; with `interleave_stages` the same part by part."""
    modules: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        modules.setdefault(_module_of_item(item, engines), []).append(number)
    lowest = [min(trainers[place.group].ranks[0] for place in item.holds) for item in items]
    lane = [(rank, items[n].needs[0].group) for n, rank in enumerate(lowest)]
    stages: dict[int, list[list[int]]] = {}
    for numbers in modules.values():
        stages.setdefault(min(lowest[n] for n in numbers), []).append(numbers)
    keyed: list[tuple[float, int, list[Step]]] = []
    for stage, listed in stages.items():
        sizes = [sum(items[n].pattern.num_bytes for n in numbers) for numbers in listed]
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
) -> list[Step]:
    """Parts of items of different trainer ranks and engine ranks in turn, more often from longer lanes, so
    that all end together."""
    lanes: dict[tuple[int, int], list[Step]] = {}
    for number in numbers:
        steps = (Step(number, part, parts[number]) for part in range(parts[number]))
        lanes.setdefault(lane_of[number], []).extend(steps)
    keyed = [
        ((2 * place + 1) / (2 * len(lane)), key, step)
        for key, lane in lanes.items()
        for place, step in enumerate(lane)
    ]
    return [step for _, _, step in sorted(keyed, key=lambda entry: entry[:2])]


def cut_counts(items: Sequence[Item], traffic: SlotTraffic, *, bucket_bytes: int) -> list[int]:
    """Into how many parts each item is cut. ConfigError where one row's worth does not fit a bucket."""
    parts: dict[tuple[int, int], int] = {}
    counts = []
    for item in items:
        key = (id(item.pattern), item.ordinal)
        if key not in parts:
            parts[key] = _parts(item, traffic, bucket_bytes)
        counts.append(parts[key])
    return counts


def windows(
    items: Sequence[Item], order: Iterable[Step], traffic: SlotTraffic, *, bucket_bytes: int
) -> list[Window]:
    """Steps in their order, grouped so that in no window any slot sends or receives more than bucket_bytes."""
    result: list[Window] = []
    steps: list[Step] = []
    total: np.ndarray | int = 0
    for step in order:
        item = items[step.item]
        grown = total + traffic.of(item.pattern, item.ordinal, step.part, step.parts)
        if steps and grown.max() > bucket_bytes:
            result.append(tuple(steps))
            steps = []
            grown = traffic.of(item.pattern, item.ordinal, step.part, step.parts)
        steps.append(step)
        total = grown
    if steps:
        result.append(tuple(steps))
    return result


def _parts(item: Item, traffic: SlotTraffic, bucket_bytes: int) -> int:
    pattern, ordinal = item.pattern, item.ordinal
    need = int(traffic.of(pattern, ordinal).max())
    granule = min(bucket_bytes, max(bucket_bytes // FINENESS, SMALLEST_GRANULE))
    if need <= granule:
        return 1
    parts = -(-need // granule)
    limit = max((max(transfer.shape, default=1) for transfer in pattern.transfers), default=1)
    while any(traffic.of(pattern, ordinal, part, parts).max() > bucket_bytes for part in range(parts)):
        if parts > limit:
            raise ConfigError(
                f"{item.tensor} cannot be cut to fit a bucket of {bucket_bytes} bytes; use a bucket of at least {need}"
            )
        parts = parts + max(1, parts // 8)
    return parts
