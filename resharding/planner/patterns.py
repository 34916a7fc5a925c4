"""Who sends what to whom: checkpoint tensors in classes, and one pattern of transfers per class. Pure.

Tensors that the same ranks hold and need in the same boxes (the experts of one expert-parallel rank in one
pipeline stage, say) form a class; its pattern is computed once. Which rank sends a cell is a closed form of
the pattern and the tensor's ordinal in its class, so that every rank computes the same choice for any tensor
without a search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from mrl.errors import WeightSyncError
from mrl.models.tensors import SCALES, LocalTensor, Piece
from mrl.resharding.planner.boxes import (
    Box,
    cells,
    contains,
    intersection,
    overlap,
)
from mrl.resharding.planner.manifest import DTYPE_BYTES, WIRE_DTYPES, RankManifest
from mrl.resharding.planner.quantised import VALUES, Blocks
from mrl.resharding.planner.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class Replicas:
    """Ranks with the same manifest."""

    ranks: tuple[int, ...]
    tensors: tuple[LocalTensor, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BoxPlace:
    """Where a box of a checkpoint tensor is: tensor `index` of the ranks of `group`."""

    group: int
    index: int
    piece: Piece


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One cell of one need of one engine rank; `candidates` are the nearest trainer ranks that hold all of
    it.

    `origins` and `target` are the cell's coordinates relative to the holding box and to the needed box;
    `holds` gives the index of each candidate's box among the tensor's holdings. `block`: the edge of the
    blocks that the sender quantises, 0 where it only casts. A cell of scales counts blocks, its origins and
    `extent` count elements of what is held.
    """

    engine_rank: int
    need: int
    shape: tuple[int, ...]
    target: tuple[int, ...]
    candidates: tuple[int, ...]
    holds: tuple[int, ...]
    origins: tuple[tuple[int, ...], ...]
    turn: int
    distance: int
    wire: int
    block: int = 0
    extent: tuple[int, ...] = ()
    """The cell's shape in elements of what is held."""

    @property
    def unit(self) -> int:
        """The cell is cut at multiples of this."""
        return self.block if self.block and self.extent == self.shape else 1

    def trainer_box(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Where the trainer rank has a part of the cell: relative to the origin, in elements of what it
        holds."""
        if not self.block or self.extent == self.shape:
            return start, shape
        return Blocks(self.extent, self.block).elements(start, shape)

    def chosen(self, ordinal: int) -> int:
        """Index of the trainer rank that sends the tensor with this ordinal in its class: the candidates take
        turns."""
        return (self.turn + ordinal) % len(self.candidates)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[WIRE_DTYPES[self.wire]]


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """All transfers of the tensors of one class."""

    transfers: tuple[Transfer, ...]
    period: int
    """Ordinals are taken modulo this."""
    bytes_not_on_slot: int
    """Bytes that engine ranks need and their own slot does not hold, counted from the boxes alone (lower
    bound)."""
    num_bytes: int
    """Bytes of all transfers, in wire dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint tensor that some engine rank needs."""

    tensor: str
    holds: tuple[BoxPlace, ...]
    needs: tuple[BoxPlace, ...]
    pattern: Pattern
    ordinal: int


def replicas(manifests: Sequence[RankManifest]) -> list[Replicas]:
    """Manifests grouped by digest, in order of first rank."""
    groups: dict[str, list[RankManifest]] = {}
    for manifest in manifests:
        groups.setdefault(manifest.digest, []).append(manifest)
    return [Replicas(tuple(m.rank for m in group), group[0].tensors) for group in groups.values()]


def places_of(groups: Sequence[Replicas]) -> dict[str, list[BoxPlace]]:
    """Every box of every checkpoint tensor, by tensor, in order of group and tensor."""
    places: dict[str, list[BoxPlace]] = {}
    for number, group in enumerate(groups):
        for index, tensor in enumerate(group.tensors):
            for piece in tensor.pieces:
                places.setdefault(piece.tensor, []).append(BoxPlace(number, index, piece))
    return places


def items(
    trainers: Sequence[Replicas], engines: Sequence[Replicas], topology: Topology, *, block: int
) -> list[Item]:
    """An item per needed checkpoint tensor, in order of first need. WeightSyncError lists boxes no trainer
    rank holds.

    `block`: edge of the blocks of tensors that are needed quantised and held wider.
    """
    held, needed = places_of(trainers), places_of(engines)
    patterns: dict[tuple, tuple[Pattern, list[int]]] = {}
    result, missing = [], []
    for tensor, needs in needed.items():
        scales = tensor.endswith(SCALES) and tensor not in held
        holds = held.get(tensor.removesuffix(SCALES) if scales else tensor, [])
        key = (scales, _key(holds, trainers), _key(needs, engines))
        if key not in patterns:
            try:
                pattern = _pattern(tensor, holds, needs, trainers, engines, topology, block, scales=scales)
                patterns[key] = (pattern, [0])
            except WeightSyncError as error:
                missing.append(str(error))
                continue
        pattern, count = patterns[key]
        result.append(Item(tensor, tuple(holds), tuple(needs), pattern, count[0] % pattern.period))
        count[0] += 1
    if missing:
        raise WeightSyncError(
            f"{len(missing)} tensors or boxes that the rollout needs are held by no trainer rank: "
            + "; ".join(missing[:20])
        )
    return result


def _key(places: Iterable[BoxPlace], groups: Sequence[Replicas]) -> tuple:
    return tuple(
        (p.group, p.piece.start, p.piece.shape, groups[p.group].tensors[p.index].dtype) for p in places
    )


def _pattern(
    tensor: str,
    holds: Sequence[BoxPlace],
    needs: Sequence[BoxPlace],
    trainers: Sequence[Replicas],
    engines: Sequence[Replicas],
    topology: Topology,
    block: int,
    *,
    scales: bool,
) -> Pattern:
    narrow = VALUES in {engines[p.group].tensors[p.index].dtype for p in needs}
    wider = any(trainers[p.group].tensors[p.index].dtype != VALUES for p in holds)
    form = _Plain(holds) if not (wider and (narrow or scales)) else _Quantised(holds, block, scales=scales)
    choices = _Choices(tensor, holds, trainers, topology, form)
    transfers: list[Transfer] = []
    missing = 0
    for engine_rank, need, place in _needs_by_rank(needs, engines):
        dtype = engines[place.group].tensors[place.index].dtype
        transfers.extend(choices.transfers(engine_rank, need, place, dtype))
        missing += choices.bytes_not_on_slot(engine_rank, place, dtype)
    period = math.lcm(*(len(transfer.candidates) for transfer in transfers)) if transfers else 1
    total = sum(transfer.num_bytes for transfer in transfers)
    return Pattern(tuple(transfers), min(period, 64), missing, total)


def _needs_by_rank(
    needs: Sequence[BoxPlace], engines: Sequence[Replicas]
) -> Iterator[tuple[int, int, BoxPlace]]:
    """(engine rank, index of the need, need) in order of rank, then of need."""
    listed = [(rank, i, place) for i, place in enumerate(needs) for rank in engines[place.group].ranks]
    yield from sorted(listed, key=lambda entry: entry[:2])


class _Plain:
    """A tensor that is needed as it is held, or cast."""

    block = 0

    def __init__(self, holds: Sequence[BoxPlace]) -> None:
        self.boxes: list[Box] = [(place.piece.start, place.piece.shape) for place in holds]
        """What each holding can give, in the units of the need."""

    def check(self, tensor: str, box: Box) -> None:
        """WeightSyncError for a need that cannot be met in this form."""

    def extent(self, cell: Box) -> tuple[int, ...]:
        """The cell's shape in elements of what is held."""
        return cell[1]

    def origin(self, cell: Box, hold: int) -> tuple[int, ...]:
        """Where a cell begins in a holding, in its elements."""
        return _relative(cell[0], self.boxes[hold][0])

    def wire(self, held: str, needed: str, *, local: bool) -> int:
        """Local copies are counted in the engine's dtype; others travel in the narrower of the two."""
        if local or DTYPE_BYTES[needed] <= DTYPE_BYTES[held]:
            return WIRE_DTYPES.index(needed)
        return WIRE_DTYPES.index(held)


class _Quantised(_Plain):
    """The values (in elements) or the scales (in blocks) of a tensor that its senders quantise, whole blocks
    only."""

    def __init__(self, holds: Sequence[BoxPlace], block: int, *, scales: bool) -> None:
        super().__init__(holds)
        self.block, self._scales, self._held = block, scales, self.boxes
        self._blocks = Blocks.of(self._held, block)
        inside = [self._blocks.inside(*box) for box in self._held]
        self.boxes = inside if scales else [self._blocks.elements(*box) for box in inside]

    def check(self, tensor: str, box: Box) -> None:
        if not self._scales and self._blocks.elements(*self._blocks.inside(*box)) != box:
            raise WeightSyncError(f"{tensor}: the box {box} cuts a block of {self.block} x {self.block}")

    def extent(self, cell: Box) -> tuple[int, ...]:
        return self._blocks.elements(*cell)[1] if self._scales else cell[1]

    def origin(self, cell: Box, hold: int) -> tuple[int, ...]:
        start = self._blocks.elements(*cell)[0] if self._scales else cell[0]
        return _relative(start, self._held[hold][0])

    def wire(self, held: str, needed: str, *, local: bool) -> int:
        return WIRE_DTYPES.index(needed)


class _Choices:
    """Chooses the trainer ranks that send the cells of one class."""

    def __init__(
        self,
        tensor: str,
        holds: Sequence[BoxPlace],
        trainers: Sequence[Replicas],
        topology: Topology,
        form: _Plain,
    ) -> None:
        self._tensor = tensor
        self._topology = topology
        self._form, self._boxes = form, form.boxes
        self._dtypes = [trainers[place.group].tensors[place.index].dtype for place in holds]
        self._ranks = [(rank, i) for i, place in enumerate(holds) for rank in trainers[place.group].ranks]
        self._turns: dict[tuple[int, ...], int] = {}
        self._grid: dict[Box, list[Box]] = {}
        self._candidates: dict[Box, list[tuple[int, int]]] = {}

    def transfers(self, engine_rank: int, need: int, place: BoxPlace, dtype: str) -> Iterator[Transfer]:
        box = (place.piece.start, place.piece.shape)
        self._form.check(self._tensor, box)
        if box not in self._grid:
            self._grid[box] = list(cells(box, {b for b in self._boxes if intersection(b, box)}))
        slot = self._topology.engine_slots[engine_rank]
        for cell in self._grid[box]:
            distance, nearest = self._nearest(cell, slot)
            ranks = tuple(rank for rank, _ in nearest)
            turn = self._turns.get(ranks, 0)
            self._turns[ranks] = turn + 1
            holds = tuple(hold for _, hold in nearest)
            yield Transfer(
                engine_rank=engine_rank,
                need=need,
                shape=cell[1],
                target=_relative(cell[0], box[0]),
                candidates=ranks,
                holds=holds,
                origins=tuple(self._form.origin(cell, hold) for hold in holds),
                turn=turn,
                distance=distance,
                wire=self._form.wire(self._dtypes[holds[0]], dtype, local=distance == 0),
                block=self._form.block,
                extent=self._form.extent(cell),
            )

    def _nearest(self, cell: Box, slot: int) -> tuple[int, list[tuple[int, int]]]:
        if cell not in self._candidates:
            self._candidates[cell] = [
                (r, hold) for r, hold in self._ranks if contains(self._boxes[hold], cell)
            ]
            if not self._candidates[cell]:
                raise WeightSyncError(f"{self._tensor} [start {cell[0]}, shape {cell[1]}]")
        by_distance: dict[int, list[tuple[int, int]]] = {}
        for rank, hold in self._candidates[cell]:
            distance = self._topology.distance(self._topology.trainer_slots[rank], slot)
            by_distance.setdefault(distance, []).append((rank, hold))
        nearest = min(by_distance)
        unique = dict(reversed(by_distance[nearest]))
        return nearest, sorted(unique.items())

    def bytes_not_on_slot(self, engine_rank: int, place: BoxPlace, dtype: str) -> int:
        """Bytes of one need that the engine rank's own slot lacks: the needed volume less what that slot's
        trainer rank holds."""
        slot = self._topology.engine_slots[engine_rank]
        box = (place.piece.start, place.piece.shape)
        here = {self._boxes[hold] for rank, hold in self._ranks if self._topology.trainer_slots[rank] == slot}
        common = sorted({c for c in (intersection(b, box) for b in here) if c})
        covered = sum(math.prod(shape) for _, shape in common)
        if overlap(common):
            covered = sum(math.prod(c[1]) for c in cells(box, common) if any(contains(b, c) for b in common))
        wire = WIRE_DTYPES[self._form.wire(self._dtypes[0], dtype, local=False)] if self._dtypes else dtype
        return (math.prod(box[1]) - covered) * DTYPE_BYTES[wire]


def _relative(start: tuple[int, ...], base: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(start, base, strict=True))
