"""The fingerprint sees every bit, every position and the length."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.resharding.planner.cells import StridedRun
from mrl.resharding.wire.device_digest import DeviceDigests, weighted_sum
from mrl.resharding.wire.digest import digest_bytes, matrix_digests

BOTH = pytest.mark.parametrize("fingerprint", [digest_bytes, weighted_sum])
Fingerprint = Callable[[torch.Tensor], int]
LENGTHS = [0, 1, 7, 8, 9, 100, 8 * (1 << 15), 8 * (1 << 15) + 5, 3 * 8 * (1 << 15) + 64]


def data(length: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length)
    )


def definition(values: bytes) -> int:
    """Return the digest by its formula, in Python integers."""
    mask, prime = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def signed_shift(value: int, bits: int) -> int:
        return (value - (1 << 64) if value >> 63 else value) >> bits & mask

    def weight(index: int) -> int:
        x = (index + 1) * prime & mask
        x = (x ^ signed_shift(x, 29)) * 0x3F58476D1CE4E5B9 & mask
        return (x ^ signed_shift(x, 32)) | 1

    words = [int.from_bytes(values[i : i + 8], "little") for i in range(0, len(values), 8)]
    total = sum(word * weight(i % (1 << 15)) * weight(i >> 15) * 3 for i, word in enumerate(words))
    return (total + len(values)) & mask


@pytest.mark.parametrize("length", LENGTHS[:8])
def test_on_devices_it_is_the_stated_formula(length: int) -> None:
    values = data(length)
    assert weighted_sum(values) == definition(values.numpy().tobytes())


def test_on_cpus_it_is_xxh3() -> None:
    """Compare with the specification's value for no bytes and seed 0."""
    assert digest_bytes(torch.empty(0, dtype=torch.uint8)) == 0x2D06800538D394C2


@BOTH
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_any_flipped_bit_changes_it(length: int, fingerprint: Fingerprint) -> None:
    values, rng = data(length), random.Random(length)
    before = fingerprint(values)
    for _ in range(30):
        index, bit = rng.randrange(length), 1 << rng.randrange(8)
        values[index] ^= bit
        assert fingerprint(values) != before
        values[index] ^= bit
    assert fingerprint(values) == before


@BOTH
def test_swapped_pieces_and_zero_padding_change_it(fingerprint: Fingerprint) -> None:
    values = data(3 * 8 * (1 << 15))
    swapped = torch.cat([values[8 * (1 << 15) :], values[: 8 * (1 << 15)]])
    assert fingerprint(swapped) != fingerprint(values)
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert len({fingerprint(zeros[:n]) for n in range(65)}) == 65


SHAPES = [(1, 1), (3, 5), (0, 4), (128, 1 << 9), (257, 300), (1, 32768), (2, 16385), (1, 4 * 8 * (1 << 15))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64])
def test_matrices_put_together_have_the_digests_that_each_has_alone(dtype: torch.dtype) -> None:
    """Sizes around a block, odd bytes and offsets, strided rows, mixed with another dtype."""
    waiting, expected = DeviceDigests(), []
    for gap in (0, 3):
        for rows, cols in SHAPES:
            flat = data((1 + (rows + 1) * (cols + gap)) * dtype.itemsize).view(dtype)
            matrix = flat[1 : 1 + rows * (cols + gap)].view(rows, cols + gap)[:, :cols]
            for values in (matrix, matrix.contiguous().view(torch.uint8)):
                waiting.add(values)
                expected.append(weighted_sum(values.contiguous().clone().view(-1).view(torch.uint8)))
    assert waiting.values() == expected == waiting.values()


class Launches(TorchDispatchMode):
    """Counts operations that a device would launch; views and empty results do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view and func not in (
            torch.ops.aten.empty.memory_format,
            torch.ops.aten._unsafe_view.default,
        ):
            self.count += 1
        return result


def test_a_device_is_asked_some_times_for_64_mib_however_many_matrices_there_are() -> None:
    """All experts of a layer of Qwen3-30B-A3B, each with two separate matrices: 1.2 GB."""
    fused = torch.empty(1536 * 2048, dtype=torch.bfloat16, device="meta")
    down = torch.empty(2048 * 768, dtype=torch.bfloat16, device="meta")
    waiting = DeviceDigests()
    with Launches() as launches:
        for _ in range(128):
            for flat, run in (
                (fused, StridedRun(0, 2048, 768, 2048)),
                (fused, StridedRun(768 * 2048, 2048, 768, 2048)),
                (down, StridedRun(0, 768, 2048, 768)),
            ):
                waiting.add(run.of(flat))
        waiting.launch()
    pieces = -(-128 * 3 * 768 * 2048 * 2 // (64 << 20))
    assert launches.count <= 20 * (pieces + 1)


def test_one_large_run_takes_two_operations_for_64_mib() -> None:
    with Launches() as launches:
        waiting = DeviceDigests()
        waiting.add(torch.empty(8 << 30, dtype=torch.uint8, device="meta").view(1, -1))
        waiting.launch()
    assert launches.count <= 2 * (8 << 30) // (64 << 20) + 40


def test_tensors_of_a_cpu_are_never_put_together() -> None:
    flat = data(4096)
    assert matrix_digests(StridedRun(at, 8, 1, 8).of(flat) for at in (0, 8)) == [
        digest_bytes(flat[:8]),
        digest_bytes(flat[8:16]),
    ]
