"""A fast fingerprint of bytes where they are: XXH3 on CPUs, a sum of products on devices. Not cryptographic.

Guards against faults (a flipped bit, a lost or swapped piece), not against an adversary. Both ends of a link
are memory of one kind, so both compute the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
import xxhash

from mrl.resharding.wire.device_digest import DeviceDigests, weighted_sum

_CACHED_BYTES = 256 << 10
"""Of strided rows put next to each other at one time: they stay in a core's cache until they are read again."""


def digest_bytes(data: torch.Tensor) -> int:
    """64-bit fingerprint of a contiguous uint8 tensor of any length."""
    assert data.dtype == torch.uint8 and data.is_contiguous() and data.ndim == 1
    if data.device.type != "cpu":
        return weighted_sum(data)
    return xxhash.xxh3_64_intdigest(data.numpy())  # type: ignore[arg-type]


class StridedMatrix(Protocol):
    """`rows` runs of `cols` elements, `stride` elements apart, of a flat array."""

    @property
    def offset(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...


def matrix_digests(pieces: Iterable[tuple[torch.Tensor, StridedMatrix]]) -> list[int]:
    """Fingerprints of matrices of flat tensors, each of its elements' bytes in row-major order whatever its
    stride.

    All tensors are of one kind of device. A device is waited for once, at the end; each tensor is let go as
    soon as its bytes were read or put next to others'.
    """
    result: list[int] = []
    on_device = DeviceDigests()
    for flat, matrix in pieces:
        if flat.device.type == "cpu":
            result.append(_on_cpu(flat, matrix))
        else:
            on_device.add(_rows(flat, matrix))
    return result or on_device.values()


def _on_cpu(flat: torch.Tensor, m: StridedMatrix) -> int:
    data, size = flat.contiguous().view(torch.uint8).numpy(), flat.itemsize
    start = m.offset * size
    if m.rows == 1 or m.stride == m.cols:
        return xxhash.xxh3_64_intdigest(data[start : start + m.rows * m.cols * size])  # type: ignore[arg-type]
    return _strided(data, start, m.rows, m.cols * size, m.stride * size)


def _strided(data: np.ndarray, start: int, rows: int, row_bytes: int, stride_bytes: int) -> int:
    word = next(w for w in (8, 4, 2, 1) if not (start % w or row_bytes % w or stride_bytes % w))
    within = data[start : start + (rows - 1) * stride_bytes + row_bytes]
    matrix = np.lib.stride_tricks.as_strided(within, (rows, row_bytes), (stride_bytes, 1)).view(f"u{word}")
    step = max(1, _CACHED_BYTES // row_bytes)
    together = np.empty((min(step, rows), matrix.shape[1]), matrix.dtype)
    state = xxhash.xxh3_64()
    for at in range(0, rows, step):
        band = matrix[at : at + step]
        np.copyto(together[: len(band)], band)
        state.update(together[: len(band)])  # type: ignore[arg-type]
    return state.intdigest()


def _rows(flat: torch.Tensor, m: StridedMatrix) -> torch.Tensor:
    """[rows, cols] of the flat tensor, in place."""
    return flat.as_strided((m.rows, m.cols), (m.stride, 1), flat.storage_offset() + m.offset)
