"""A fast fingerprint of bytes where they are: XXH3 on CPUs, a sum of products on devices. Not cryptographic.

Guards against faults (a flipped bit, a lost or swapped piece), not against an adversary. Both ends of a link
are memory of one kind, so both compute the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def matrix_digests(matrices: Iterable[torch.Tensor]) -> list[int]:
    """Return the fingerprint of each matrix: of its elements' bytes in row-major order, whatever its stride.

    All matrices are of one kind of device, and their rows have no gaps. A device is waited for once, at the
    end; each matrix is let go as soon as its bytes were read or put next to others'.
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
    together = np.empty((min(step, rows), words.shape[1]), words.dtype)
    state = xxhash.xxh3_64()
    for first in range(0, rows, step):
        band = words[first : first + step]
        np.copyto(together[: len(band)], band)
        state.update(together[: len(band)])  # type: ignore[arg-type]
    return state.intdigest()
