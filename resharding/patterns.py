"""Who sends what to whom: checkpoint tensors in classes, and one pattern of transfers per class. Pure.

Tensors that the same ranks hold and need in the same boxes (the experts of one expert-parallel rank in one pipeline
stage, say) form a class; its pattern is computed once. The holder of each cell is a closed form of the pattern and the
tensor's ordinal in its class, so that every rank computes the same choice for any tensor without a search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from models.manifest import LocalTensor, Piece
from mrl.errors import ReshardError
from resharding.boxes import Box, cells, contains, intersection, overlap, volume
from resharding.copies import WIRE_DTYPES
from resharding.manifest import DTYPE_BYTES, RankManifest
from resharding.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class Replicas:
    """Ranks with the same manifest."""

    ranks: tuple[int, ...]
    tensors: tuple[LocalTensor, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a box of a checkpoint tensor is: tensor `index` of the ranks of `group`."""

    group: int
    index: int
    piece: Piece


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One cell of one need of one destination rank; `candidates` are the nearest source ranks that hold all of it.

    `origin` and `target` are the cell's coordinates relative to the holding box and to the needed box; `holds` gives the
    index of each candidate's box among the tensor's holdings.
    """

    destination: int
    need: int
    shape: tuple[int, ...]
    target: tuple[int, ...]
    candidates: tuple[int, ...]
    holds: tuple[int, ...]
    origins: tuple[tuple[int, ...], ...]
    turn: int
    distance: int
    wire: int

    def chosen(self, ordinal: int) -> int:
        """Index of the holder for the tensor with this ordinal in its class: turns go round the candidates."""
        return (self.turn + ordinal) % len(self.candidates)

    @property
    def num_bytes(self) -> int:
        return volume(self.shape) * DTYPE_BYTES[WIRE_DTYPES[self.wire]]


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """All transfers of the tensors of one class."""

    transfers: tuple[Transfer, ...]
    period: int
    """Ordinals are taken modulo this."""
    bytes_not_on_slot: int
    """Bytes that destinations need and their own slot does not hold, counted from the boxes alone (lower bound)."""
    num_bytes: int
    """Bytes of all transfers, in wire dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint tensor that some destination needs."""

    tensor: str
    holds: tuple[Place, ...]
    needs: tuple[Place, ...]
    pattern: Pattern
    ordinal: int


def replicas(manifests: Sequence[RankManifest]) -> list[Replicas]:
    """Manifests grouped by digest, in order of first rank."""
    found: dict[str, list[RankManifest]] = {}
    for manifest in manifests:
        found.setdefault(manifest.digest, []).append(manifest)
    return [Replicas(tuple(m.rank for m in group), group[0].tensors) for group in found.values()]


def places(groups: Sequence[Replicas]) -> dict[str, list[Place]]:
    """Every box of every checkpoint tensor, by tensor, in order of group and tensor."""
    found: dict[str, list[Place]] = {}
    for number, group in enumerate(groups):
        for index, tensor in enumerate(group.tensors):
            for piece in tensor.pieces:
                found.setdefault(piece.tensor, []).append(Place(number, index, piece))
    return found


def items(sources: Sequence[Replicas], destinations: Sequence[Replicas], topology: Topology) -> list[Item]:
    """An item per needed checkpoint tensor, in order of first need. ReshardError lists boxes no source holds."""
    held, needed = places(sources), places(destinations)
    patterns: dict[tuple, tuple[Pattern, list[int]]] = {}
    result, missing = [], []
    for tensor, needs in needed.items():
        holds = held.get(tensor, [])
        key = (_key(holds, sources), _key(needs, destinations))
        if key not in patterns:
            try:
                patterns[key] = (_pattern(tensor, holds, needs, sources, destinations, topology), [0])
            except ReshardError as error:
                missing.append(str(error))
                continue
        pattern, count = patterns[key]
        result.append(Item(tensor, tuple(holds), tuple(needs), pattern, count[0] % pattern.period))
        count[0] += 1
    if missing:
        raise ReshardError(
            f"{len(missing)} tensors or boxes that the rollout needs are held by no trainer rank: "
            + "; ".join(missing[:20])
        )
    return result


def _key(found: Iterable[Place], groups: Sequence[Replicas]) -> tuple:
    return tuple(
        (p.group, p.piece.start, p.piece.shape, groups[p.group].tensors[p.index].dtype) for p in found
    )


def _pattern(
    tensor: str,
    holds: Sequence[Place],
    needs: Sequence[Place],
    sources: Sequence[Replicas],
    destinations: Sequence[Replicas],
    topology: Topology,
) -> Pattern:
    choices = _Choices(tensor, holds, sources, topology)
    transfers: list[Transfer] = []
    missing = 0
    for destination, need, place in _needs_by_rank(needs, destinations):
        dtype = destinations[place.group].tensors[place.index].dtype
        transfers.extend(choices.transfers(destination, need, place, dtype))
        missing += choices.bytes_not_on_slot(destination, place, dtype)
    period = math.lcm(*(len(transfer.candidates) for transfer in transfers)) if transfers else 1
    total = sum(transfer.num_bytes for transfer in transfers)
    return Pattern(tuple(transfers), min(period, 64), missing, total)


def _needs_by_rank(
    needs: Sequence[Place], destinations: Sequence[Replicas]
) -> Iterator[tuple[int, int, Place]]:
    """(destination rank, index of the need, need) in order of rank, then of need."""
    listed = [(rank, i, place) for i, place in enumerate(needs) for rank in destinations[place.group].ranks]
    yield from sorted(listed, key=lambda entry: entry[:2])


class _Choices:
    """Chooses holders for the cells of one class."""

    def __init__(
        self, tensor: str, holds: Sequence[Place], sources: Sequence[Replicas], topology: Topology
    ) -> None:
        self._tensor = tensor
        self._topology = topology
        self._boxes: list[Box] = [(place.piece.start, place.piece.shape) for place in holds]
        self._dtypes = [sources[place.group].tensors[place.index].dtype for place in holds]
        self._ranks = [(rank, i) for i, place in enumerate(holds) for rank in sources[place.group].ranks]
        self._turns: dict[tuple[int, ...], int] = {}
        self._grid: dict[Box, list[Box]] = {}
        self._holders: dict[Box, list[tuple[int, int]]] = {}

    def transfers(self, destination: int, need: int, place: Place, dtype: str) -> Iterator[Transfer]:
        box = (place.piece.start, place.piece.shape)
        if box not in self._grid:
            self._grid[box] = list(cells(box, {b for b in self._boxes if intersection(b, box)}))
        slot = self._topology.destination_slots[destination]
        for cell in self._grid[box]:
            distance, found = self._nearest(cell, slot)
            ranks = tuple(rank for rank, _ in found)
            turn = self._turns.get(ranks, 0)
            self._turns[ranks] = turn + 1
            holds = tuple(hold for _, hold in found)
            yield Transfer(
                destination=destination,
                need=need,
                shape=cell[1],
                target=_relative(cell[0], box[0]),
                candidates=ranks,
                holds=holds,
                origins=tuple(_relative(cell[0], self._boxes[hold][0]) for hold in holds),
                turn=turn,
                distance=distance,
                wire=_wire(self._dtypes[holds[0]], dtype, local=distance == 0),
            )

    def _nearest(self, cell: Box, slot: int) -> tuple[int, list[tuple[int, int]]]:
        if cell not in self._holders:
            self._holders[cell] = [(r, hold) for r, hold in self._ranks if contains(self._boxes[hold], cell)]
            if not self._holders[cell]:
                raise ReshardError(f"{self._tensor} [start {cell[0]}, shape {cell[1]}]")
        by_distance: dict[int, list[tuple[int, int]]] = {}
        for rank, hold in self._holders[cell]:
            distance = self._topology.distance(self._topology.source_slots[rank], slot)
            by_distance.setdefault(distance, []).append((rank, hold))
        nearest = min(by_distance)
        unique = dict(reversed(by_distance[nearest]))
        return nearest, sorted(unique.items())

    def bytes_not_on_slot(self, destination: int, place: Place, dtype: str) -> int:
        """Bytes of one need that the destination's own slot lacks: the needed volume less what its source's boxes cover."""
        slot = self._topology.destination_slots[destination]
        box = (place.piece.start, place.piece.shape)
        here = {self._boxes[hold] for rank, hold in self._ranks if self._topology.source_slots[rank] == slot}
        common = sorted({c for c in (intersection(b, box) for b in here) if c})
        covered = sum(volume(shape) for _, shape in common)
        if overlap(common):
            covered = sum(volume(c[1]) for c in cells(box, common) if any(contains(b, c) for b in common))
        wire = WIRE_DTYPES[_wire(self._dtypes[0], dtype, local=False)] if self._dtypes else dtype
        return (volume(box[1]) - covered) * DTYPE_BYTES[wire]


def _relative(start: tuple[int, ...], base: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(start, base, strict=True))


def _wire(source: str, destination: str, *, local: bool) -> int:
    """Local copies are counted in the destination's dtype; others travel in the narrower of the two."""
    if local or DTYPE_BYTES[destination] <= DTYPE_BYTES[source]:
        return WIRE_DTYPES.index(destination)
    return WIRE_DTYPES.index(source)
