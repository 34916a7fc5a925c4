"""How full checkpoint tensors are put together from what the trainer ranks hold, bucket by bucket. Pure.

The gather path is the oracle and the fallback: every slot packs every full tensor. Each piece comes from the
lowest rank that holds it; a tensor larger than a bucket is cut into boxes that are contiguous in its
row-major bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from mrl.errors import WeightSyncError
from mrl.models.tensors import CheckpointTensor, LocalTensor
from mrl.resharding.planner.boxes import Box, intersection, overlap
from mrl.resharding.planner.cells import WholeCells
from mrl.resharding.planner.manifest import DTYPE_BYTES
from mrl.resharding.transfer.session import Whole, WireTensor, wire_digest

ALIGNMENT = 64
"""Bytes; a multiple of every element size, and what vectorised copies like."""


@dataclasses.dataclass(frozen=True, slots=True)
class BucketBox:
    """A box of a checkpoint tensor that lies contiguously in a bucket."""

    tensor: int
    """Index in the plan's tensors."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    first_byte: int
    """Of the tensor's row-major bytes."""
    num_bytes: int
    offset: int
    """In the bucket."""


@dataclasses.dataclass(frozen=True, slots=True)
class PieceCopy:
    """local[local_start : + shape] -> box[box_start : + shape]."""

    local: int
    """Index in the sending rank's manifest."""
    local_start: tuple[int, ...]
    box: int
    box_start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    """Where the piece lies in the sending rank's packed contribution to this bucket."""
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GatherBucket:
    """What one bucket brings, and how the ranks fill it together."""

    boxes: tuple[BucketBox, ...]
    used_bytes: int
    copies: tuple[tuple[int, tuple[PieceCopy, ...], int], ...]
    """(trainer rank, its copies, bytes of its packed contribution), by rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class GatherPlan:
    """The same object on every rank."""

    tensors: tuple[WireTensor, ...]
    buckets: tuple[GatherBucket, ...]
    digest: str
    """What a session carries."""
    trainers: tuple[tuple[LocalTensor, ...], ...]
    """By trainer rank, what it holds."""
    cells: WholeCells

    @property
    def content(self) -> Whole:
        """What receivers are told will come."""
        return Whole(self.tensors, self.cells.all)

    @property
    def num_bytes(self) -> int:
        """Payload of one slot."""
        return sum(box.num_bytes for bucket in self.buckets for box in bucket.boxes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Holding:
    """A box of a checkpoint tensor in one trainer rank's memory."""

    rank: int
    local: int
    local_start: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


def build(
    checkpoint: Sequence[CheckpointTensor], trainers: Sequence[Sequence[LocalTensor]], bucket_bytes: int
) -> GatherPlan:
    """`trainers`: per trainer rank, what it holds. Wire dtype is the trainer's. WeightSyncError names
    uncovered tensors."""
    if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
        raise WeightSyncError(f"bucket_bytes = {bucket_bytes} must be a multiple of {ALIGNMENT}")
    if stacked := [tensor.name for tensor in checkpoint if tensor.stack]:
        raise WeightSyncError(
            f"{len(stacked)} tensors lie transposed in the folder and cannot be brought whole, first {stacked[:3]}; "
            "a plan brings them: sync.mode = planned"
        )
    held, dtypes = _lowest_holdings(trainers)
    tensors, holdings = [], []
    for tensor in checkpoint:
        pieces = list(held.get(tensor.name, {}).values())
        covered = sum(math.prod(p.shape) for p in pieces)
        if covered != math.prod(tensor.shape) or overlap([(p.start, p.shape) for p in pieces]):
            raise WeightSyncError(
                f"{tensor.name} {tensor.shape}: the trainer ranks hold {covered} of {math.prod(tensor.shape)} elements "
                f"in {len(pieces)} distinct boxes; they must tile it exactly"
            )
        tensors.append(WireTensor(tensor.name, dtypes[tensor.name], tensor.shape))
        holdings.append(pieces)
    buckets = tuple(_bucket(boxes, tensors, holdings) for boxes in _cut_to_buckets(tensors, bucket_bytes))
    lowest = {t.name: {box: h.rank for box, h in held.get(t.name, {}).items()} for t in tensors}
    cells = WholeCells(lowest, dtypes)
    return GatherPlan(
        tuple(tensors),
        buckets,
        wire_digest(tensors, cells.all),
        tuple(tuple(tensors_of_rank) for tensors_of_rank in trainers),
        cells,
    )


def _lowest_holdings(
    trainers: Sequence[Sequence[LocalTensor]],
) -> tuple[dict[str, dict[Box, _Holding]], dict[str, str]]:
    """Tensor name -> its distinct boxes, each where the lowest rank has it; tensor name -> dtype."""
    held: dict[str, dict[Box, _Holding]] = {}
    dtypes: dict[str, str] = {}
    for rank, locals_ in enumerate(trainers):
        for index, local in enumerate(locals_):
            for piece in local.pieces:
                if dtypes.setdefault(piece.tensor, local.dtype) != local.dtype:
                    raise WeightSyncError(
                        f"{piece.tensor} is held as {dtypes[piece.tensor]} and as {local.dtype} (rank {rank})"
                    )
                holding = _Holding(rank, index, piece.local_start, piece.start, piece.shape)
                held.setdefault(piece.tensor, {}).setdefault((piece.start, piece.shape), holding)
    return held, dtypes


def _cut_to_buckets(tensors: Sequence[WireTensor], bucket_bytes: int) -> Iterator[list[BucketBox]]:
    """Boxes of all tensors in order, cut into buckets; a bucket is never empty."""
    current: list[BucketBox] = []
    used = 0
    for index, tensor in enumerate(tensors):
        size = DTYPE_BYTES[tensor.dtype]
        first = 0
        for start, shape in _cut(tensor.shape, bucket_bytes // size):
            length = math.prod(shape) * size
            if used + length > bucket_bytes and current:
                yield current
                current, used = [], 0
            current.append(BucketBox(index, start, shape, first, length, used))
            first += length
            used = -(-(used + length) // ALIGNMENT) * ALIGNMENT
    if current:
        yield current


def _cut(shape: tuple[int, ...], largest: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of boxes of at most `largest` elements, contiguous and in row-major order.

    >>> list(_cut((2, 3), 2))
    [((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 1))]
    """
    if math.prod(shape) <= largest:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:])
    if row <= largest:
        rows = largest // row
        for first in range(0, shape[0], rows):
            yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])
        return
    for first in range(shape[0]):
        for start, inner in _cut(shape[1:], largest):
            yield (first, *start), (1, *inner)


def _bucket(
    boxes: list[BucketBox], tensors: Sequence[WireTensor], holdings: Sequence[Sequence[_Holding]]
) -> GatherBucket:
    packed: dict[int, list[PieceCopy]] = {}
    offsets: dict[int, int] = {}
    for number, box in enumerate(boxes):
        size = DTYPE_BYTES[tensors[box.tensor].dtype]
        for holding in holdings[box.tensor]:
            common = intersection((box.start, box.shape), (holding.start, holding.shape))
            if common is None:
                continue
            start, shape = common
            offset = offsets.get(holding.rank, 0)
            copy = PieceCopy(
                local=holding.local,
                local_start=_move(start, holding.start, holding.local_start),
                box=number,
                box_start=_move(start, box.start, (0,) * len(start)),
                shape=shape,
                offset=offset,
                num_bytes=math.prod(shape) * size,
            )
            packed.setdefault(holding.rank, []).append(copy)
            offsets[holding.rank] = -(-(offset + copy.num_bytes) // size) * size
            offsets[holding.rank] = -(-offsets[holding.rank] // 8) * 8
    last = boxes[-1]
    copies = tuple((rank, tuple(packed[rank]), offsets[rank]) for rank in sorted(packed))
    return GatherBucket(tuple(boxes), last.offset + last.num_bytes, copies)


def _move(position: tuple[int, ...], origin: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(p - o + t for p, o, t in zip(position, origin, target, strict=True))
