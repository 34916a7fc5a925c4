"""The fingerprint sees every bit, every position and the length."""

import random
from collections.abc import Callable

import pytest
import torch

from mrl.resharding.wire.digest import digest, weighted_sum

BOTH = pytest.mark.parametrize("fingerprint", [digest, weighted_sum])
Fingerprint = Callable[[torch.Tensor], int]
LENGTHS = [0, 1, 7, 8, 9, 100, 8 * (1 << 15), 8 * (1 << 15) + 5, 3 * 8 * (1 << 15) + 64]


def data(length: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length)
    )


def definition(values: bytes) -> int:
    """The formula, word by word in Python integers."""
    mask, prime = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def signed_shift(value: int, bits: int) -> int:
        return (value - (1 << 64) if value >> 63 else value) >> bits & mask

    def weight(index: int) -> int:
        x = (index + 1) * prime & mask
        x = (x ^ signed_shift(x, 29)) * 0x3F58476D1CE4E5B9 & mask
        return (x ^ signed_shift(x, 32)) | 1

    whole = len(values) // 8 * 8
    words = [int.from_bytes(values[i : i + 8], "little") for i in range(0, whole, 8)]
    total = sum(word * weight(i % (1 << 15)) * weight(i >> 15) * 3 for i, word in enumerate(words))
    tail = int.from_bytes(values[whole:], "little") * prime
    return (total + tail + len(values)) & mask


@pytest.mark.parametrize("length", LENGTHS[:8])
def test_on_devices_it_is_the_stated_formula(length: int) -> None:
    values = data(length)
    assert weighted_sum(values) == definition(values.numpy().tobytes())


def test_on_cpus_it_is_xxh3() -> None:
    """The values of the algorithm's own specification, for no bytes and with seed 0."""
    assert digest(torch.empty(0, dtype=torch.uint8)) == 0x2D06800538D394C2


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
