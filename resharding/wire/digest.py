"""A fast fingerprint of bytes in place: XXH3 on CPUs, a sum of products on devices. Not cryptographic.

It guards against faults (a flipped bit, a lost or swapped piece), not against an adversary. Both ends of a
link have the same kind of memory, so both compute the same fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xxhash

from mrl.resharding.wire.device_digest import DeviceDigests, weighted_sum

_CACHED_BYTES = 256 << 10
"""Bytes of strided rows gathered at a time: they stay in a core's cache until they are read again."""


def digest_bytes(data: torch.Tensor) -> int:
    """Return the 64-bit fingerprint of a contiguous uint8 tensor of any length."""
    assert data.dtype == torch.uint8 and data.is_contiguous() and data.ndim == 1
    if data.device.type != "cpu":
        return weighted_sum(data)
    return xxhash.xxh3_64_intdigest(data.numpy())  # type: ignore[arg-type]


def matrix_digests(matrices: Iterable[torch.Tensor]) -> list[int]:
    """Return each matrix's fingerprint, of its elements' bytes in row-major order, whatever its stride.

    All matrices are on one kind of device, and their rows have no gaps. It waits for a device once, at the
    end, and releases each matrix after its bytes were read or gathered.
    """
    result: list[int] = []
    on_device = DeviceDigests()
    for matrix in matrices:
        if matrix.device.type == "cpu":
            result.append(_on_cpu(matrix))
        else:
            on_device.add(matrix)
    return result or on_device.values()


def _on_cpu(matrix: torch.Tensor) -> int:
    data = matrix.view(torch.uint8).numpy()
    if data.flags.c_contiguous:
        return xxhash.xxh3_64_intdigest(data)  # type: ignore[arg-type]
    (rows, row_bytes), at, stride = data.shape, data.ctypes.data, data.strides[0]
    word = next(w for w in (8, 4, 2, 1) if not (at % w or row_bytes % w or stride % w))
    words = data.view(f"u{word}")
    step = max(1, _CACHED_BYTES // row_bytes)
    gathered = np.empty((min(step, rows), words.shape[1]), words.dtype)
    state = xxhash.xxh3_64()
    for first in range(0, rows, step):
        band = words[first : first + step]
        np.copyto(gathered[: len(band)], band)
        state.update(gathered[: len(band)])  # type: ignore[arg-type]
    return state.intdigest()
