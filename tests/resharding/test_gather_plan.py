"""Buckets of the gather path tile every tensor exactly, within the bucket, from what the ranks hold."""

import itertools
import math
import random

import pytest
import torch

from mrl.errors import WeightSyncError
from mrl.models.tensors import CheckpointTensor, LocalTensor, Piece
from mrl.resharding.transfer import gather_plan
from mrl.resharding.transfer.assembly import DTYPES, Assembly
from mrl.resharding.transfer.gather import _read
from mrl.resharding.wire.messages import Span


def whole(name: str, shape: tuple[int, ...], dtype: str = "float32") -> tuple[CheckpointTensor, LocalTensor]:
    zero = (0,) * len(shape)
    return CheckpointTensor(name, shape, dtype), LocalTensor(
        name, 0, shape, dtype, (Piece(name, zero, shape, zero),)
    )


def random_model(
    rng: random.Random, count: int
) -> tuple[list[CheckpointTensor], list[LocalTensor], list[torch.Tensor]]:
    tensors = []
    for index in range(count):
        dtype = rng.choice(["float32", "bfloat16", "float8_e4m3fn", "uint8", "int64"])
        shape = tuple(rng.randrange(0 if rng.random() < 0.05 else 1, 40) for _ in range(rng.randrange(0, 4)))
        tensors.append(whole(f"t{index}", shape, dtype))
    values = [
        torch.randint(0, 200, (math.prod(c.shape) * DTYPES[c.dtype].itemsize,), dtype=torch.uint8)
        .view(DTYPES[c.dtype])
        .view(c.shape)
        for c, _ in tensors
    ]
    return [c for c, _ in tensors], [local for _, local in tensors], values


@pytest.mark.parametrize("seed", range(12))
def test_random_tensors_come_back_byte_for_byte(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    checkpoint, locals_, values = random_model(rng, 30)
    bucket_bytes = rng.choice([64, 128, 1024, 65536])
    plan = gather_plan.build(checkpoint, [locals_], bucket_bytes)
    assembly = Assembly(plan.tensors, device=torch.device("cpu"))
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8)
    found: dict[str, torch.Tensor] = {}
    for window in plan.buckets:
        assert 0 <= window.used_bytes <= bucket_bytes and window.boxes
        _read(buffer, window, plan, {0: values})
        spans = [
            Span(tensor=b.tensor, start=b.first_byte, num_bytes=b.num_bytes, offset=b.offset)
            for b in window.boxes
        ]
        found |= dict(assembly.take(spans, buffer[: window.used_bytes].clone()))
    assembly.require_complete()
    for tensor, value in zip(checkpoint, values, strict=True):
        assert found[tensor.name].shape == value.shape and found[tensor.name].dtype == value.dtype
        assert (
            torch.equal(found[tensor.name].view(torch.uint8), value.view(torch.uint8))
            if value.ndim
            else (
                found[tensor.name].view(1).view(torch.uint8).tolist()
                == value.view(1).view(torch.uint8).tolist()
            )
        )


@pytest.mark.parametrize("elements", [1, 255, 256, 257, 511, 512, 513, 5000])
def test_sizes_around_a_bucket(elements: int) -> None:
    """A bucket of 1024 bytes holds 256 floats: equal to it, one over, and far larger."""
    checkpoint, local = whole("a", (elements,))
    plan = gather_plan.build([checkpoint], [[local]], 1024)
    assert len(plan.buckets) == -(-elements // 256)
    assert plan.num_bytes == elements * 4


def test_pieces_come_from_the_lowest_holder_and_tile_the_tensor() -> None:
    """4 ranks: rows split over two of them, each half held twice."""
    half = [LocalTensor("w", 0, (3, 5), "float32", (Piece("w", (3 * r, 0), (3, 5), (0, 0)),)) for r in (0, 1)]
    plan = gather_plan.build(
        [CheckpointTensor("w", (6, 5), "float32")], [[half[0]], [half[1]], [half[0]], [half[1]]], 4096
    )
    (window,) = plan.buckets
    assert [(rank, len(copies)) for rank, copies, _ in window.copies] == [(0, 1), (1, 1)]
    assert {c.box_start for _, copies, _ in window.copies for c in copies} == {(0, 0), (3, 0)}


@pytest.mark.parametrize(
    ("pieces", "what"),
    [
        ([Piece("w", (0, 0), (3, 5), (0, 0))], "15 of 30"),
        ([Piece("w", (0, 0), (4, 5), (0, 0)), Piece("w", (2, 0), (2, 5), (0, 0))], "30 of 30"),
        ([Piece("v", (0, 0), (6, 5), (0, 0))], "0 of 30"),
    ],
)
def test_holes_and_overlaps_are_refused_by_name(pieces: list[Piece], what: str) -> None:
    local = LocalTensor("x", 0, (6, 5), "float32", tuple(pieces))
    with pytest.raises(WeightSyncError, match=f"w .*{what}"):
        gather_plan.build([CheckpointTensor("w", (6, 5), "float32")], [[local]], 1024)


def test_one_tensor_in_two_dtypes_is_refused() -> None:
    locals_ = [
        LocalTensor("x", 0, (3,), d, (Piece("w", (3 * i,), (3,), (0,)),))
        for i, d in enumerate(["float32", "bfloat16"])
    ]
    with pytest.raises(WeightSyncError, match="bfloat16"):
        gather_plan.build([CheckpointTensor("w", (6,), "float32")], [locals_], 1024)


def test_boxes_are_contiguous_in_row_major_order() -> None:
    for shape, largest in itertools.product([(7,), (3, 5), (2, 3, 4), (1, 1, 9), (5, 1)], [1, 2, 3, 7, 100]):
        numbers = torch.arange(math.prod(shape)).view(shape)
        found = [
            numbers[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))].flatten()
            for start, size in gather_plan._cut(shape, largest)
        ]
        assert all(f.numel() <= largest for f in found)
        assert torch.equal(torch.cat(found), numbers.flatten())


def test_what_a_folder_has_transposed_is_not_brought_whole() -> None:
    tensor, local = whole("experts", (8, 4))
    stacked = CheckpointTensor("experts", (8, 4), "float32", stack=2)
    assert gather_plan.build([tensor], [[local]], 64).tensors
    with pytest.raises(WeightSyncError, match=r"1 tensors lie transposed .*'experts'.*sync\.mode = planned"):
        gather_plan.build([stacked], [[local]], 64)
