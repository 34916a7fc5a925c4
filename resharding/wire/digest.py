"""A fast fingerprint of bytes where they are: XXH3 on CPUs, a sum of products on devices. Not cryptographic.

Guards against faults (a flipped bit, a lost or swapped piece), not against an adversary. Both ends of a link
are memory of one kind, so both compute the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import xxhash

_BLOCK_WORDS = 1 << 15
_DEVICE_BLOCKS = 256
"""Blocks that a device sums in one launch: their products take 64 MiB."""
_CACHED_BYTES = 256 << 10
"""Of strided rows put next to each other at one time: they stay in a core's cache until they are read again."""
_MASK = (1 << 64) - 1
_PRIME = 0x9E3779B97F4A7C15


def digest(data: torch.Tensor) -> int:
    """64-bit fingerprint of a contiguous uint8 tensor of any length."""
    assert data.dtype == torch.uint8 and data.is_contiguous() and data.ndim == 1
    if data.device.type != "cpu":
        return weighted_sum(data)
    return xxhash.xxh3_64_intdigest(data.numpy())  # type: ignore[arg-type]


class Matrix(Protocol):
    """`rows` runs of `cols` elements, `stride` elements apart, of a flat array."""

    @property
    def offset(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...


def matrix_digests(flat: torch.Tensor, matrices: Sequence[Matrix]) -> list[int]:
    """Fingerprints of matrices of a flat tensor, each of its elements' bytes in row-major order whatever its
    stride."""
    if not matrices:
        return []
    if flat.device.type != "cpu":
        sums = [_sum(_together(flat, matrix).view(torch.uint8)) for matrix in matrices]
        return [value & _MASK for value in torch.stack(sums).tolist()]  # one wait for the device
    data, size = flat.contiguous().view(torch.uint8).numpy(), flat.itemsize
    result = []
    for m in matrices:
        start = m.offset * size
        if m.rows == 1 or m.stride == m.cols:
            result.append(xxhash.xxh3_64_intdigest(data[start : start + m.rows * m.cols * size]))  # type: ignore[arg-type]
        else:
            result.append(_strided(data, start, m.rows, m.cols * size, m.stride * size))
    return result


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


def _together(flat: torch.Tensor, m: Matrix) -> torch.Tensor:
    matrix = flat.as_strided((m.rows, m.cols), (m.stride, 1), flat.storage_offset() + m.offset)
    return matrix.contiguous().view(-1)


def weighted_sum(data: torch.Tensor) -> int:
    """The fingerprint that vectorised arithmetic of any device computes, position by position.

    With 8-byte words x in blocks of 2^15: s_b = sum_j x_bj w_j, result = sum_b s_b v_b + tail + length,
    modulo 2^64. All weights are odd and pseudo-random, so every single-bit change changes the result.
    """
    return int(_sum(data)) & _MASK


def _sum(data: torch.Tensor) -> torch.Tensor:
    """[] int64 on the data's device, which is not waited for."""
    num_words = data.numel() // 8
    if data.storage_offset() % 8:
        data = data.clone()  # words begin where words may
    whole, rest = data[: num_words * 8].view(torch.int64), data[num_words * 8 :].long()
    bits = torch.arange(0, 8 * rest.numel(), 8, device=data.device)
    tail = (rest << bits).sum() * (_PRIME - (1 << 64))
    num_blocks = num_words // _BLOCK_WORDS
    weights = _weights(_BLOCK_WORDS, data.device)
    most = 1 if data.device.type == "cpu" else _DEVICE_BLOCKS
    grid = whole[: num_blocks * _BLOCK_WORDS].view(-1, _BLOCK_WORDS)
    sums = [(grid[b : b + most] * weights).sum(1) for b in range(0, num_blocks, most)]
    short = whole[num_blocks * _BLOCK_WORDS :]
    sums.append((short * weights[: short.numel()]).sum(0, keepdim=True))
    blocks = torch.cat(sums)
    return (blocks * _block_weights(len(blocks), data.device)).sum() + tail + data.numel()


@functools.lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """[count] odd int64: Weyl sequence through an xor-shift-multiply mix."""
    values = torch.arange(1, count + 1, dtype=torch.int64, device=device) * (_PRIME - (1 << 64))
    values = (values ^ (values >> 29)) * 0x3F58476D1CE4E5B9
    return (values ^ (values >> 32)) | 1


def _block_weights(count: int, device: torch.device) -> torch.Tensor:
    """[count] odd weights of the blocks, other than those of the words."""
    size = max(256, 1 << (count - 1).bit_length())
    return _weights(size, device)[:count] * 3
