"""Fingerprint of bytes on a device: a sum of products of 8-byte words, in launches of 64 MiB."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

_BLOCK_WORDS = 1 << 15
_DEVICE_BLOCKS = 256
"""Blocks summed per launch: they and their products take 64 MiB each."""
_MASK = (1 << 64) - 1
_PRIME = 0x9E3779B97F4A7C15


def weighted_sum(data: torch.Tensor) -> int:
    """Return the fingerprint, which vectorised arithmetic on any device computes.

    With 8-byte words x, the last padded with zeros, in blocks of 2^15: s_b = sum_j x_bj w_j; the result is
    sum_b s_b v_b + length, modulo 2^64. Weights are odd and pseudo-random: any single-bit change changes it.
    """
    return int(_sum(data)) & _MASK


def _sum(data: torch.Tensor) -> torch.Tensor:
    """Return the sum, [] int64 on the data's device, without waiting for the device."""
    length = data.numel()
    if data.storage_offset() % 8 or length % 8:
        data = torch.cat([data, data.new_zeros(-length % 8)])  # int64 views need 8-byte alignment
    whole = data.view(torch.int64)
    num_blocks = whole.numel() // _BLOCK_WORDS
    weights = _weights(_BLOCK_WORDS, data.device)
    most = 1 if data.device.type == "cpu" else _DEVICE_BLOCKS
    grid = whole[: num_blocks * _BLOCK_WORDS].view(-1, _BLOCK_WORDS)
    sums = [(grid[b : b + most] * weights).sum(1) for b in range(0, num_blocks, most)]
    short = whole[num_blocks * _BLOCK_WORDS :]
    sums.append((short * weights[: short.numel()]).sum(0, keepdim=True))
    blocks = torch.cat(sums)
    return (blocks * _block_weights(len(blocks), data.device)).sum() + length


@functools.lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return [count] odd int64: a Weyl sequence through an xor-shift-multiply mix."""
    values = torch.arange(1, count + 1, dtype=torch.int64, device=device) * (_PRIME - (1 << 64))
    values = (values ^ (values >> 29)) * 0x3F58476D1CE4E5B9
    return (values ^ (values >> 32)) | 1


def _block_weights(count: int, device: torch.device) -> torch.Tensor:
    """Return [count] odd weights of blocks, different from those of words."""
    size = max(256, 1 << (count - 1).bit_length())
    return _weights(size, device)[:count] * 3


class DeviceDigests:
    """Fingerprints of many matrices (tens of thousands) on one device, gathered until they fill a launch."""

    def __init__(self) -> None:
        self._matrices: list[torch.Tensor] = []
        self._blocks = 0
        self._sums: list[torch.Tensor] = []

    def add(self, matrix: torch.Tensor) -> None:
        """Add a matrix of any strides; its fingerprint is of its elements' bytes in row-major order."""
        blocks = _blocks_of(matrix)
        if blocks >= _DEVICE_BLOCKS:
            self.launch()
            self._sums.append(_sum(matrix.reshape(-1).view(torch.uint8)).view(1))
            return
        if self._blocks + blocks > _DEVICE_BLOCKS:
            self.launch()
        self._matrices.append(matrix)
        self._blocks += blocks

    def values(self) -> list[int]:
        """Return all fingerprints (`weighted_sum`) in the order of `add`; waits for the device."""
        self.launch()
        sums = torch.cat(self._sums).tolist() if self._sums else []
        return [value & _MASK for value in sums]

    def launch(self) -> None:
        """Launch the matrices that have not filled a launch yet."""
        if self._matrices:
            self._sums.append(_sums_together(self._matrices))
        self._matrices, self._blocks = [], 0


def _blocks_of(matrix: torch.Tensor) -> int:
    return max(1, -(-matrix.nbytes // (8 * _BLOCK_WORDS)))


def _sums_together(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `_sum` of each matrix, [matrices] int64, in a few launches for all.

    Gathers them, each in its own blocks, and pads its last block with 0.
    """
    device, counts = matrices[0].device, [_blocks_of(matrix) for matrix in matrices]
    data = torch.empty(sum(counts) * 8 * _BLOCK_WORDS, dtype=torch.uint8, device=device)
    starts = np.cumsum([0, *counts])
    begins = (starts[:-1] * 8 * _BLOCK_WORDS).tolist()
    _copy_into(data, begins, matrices)
    ends = zip(begins, matrices, (starts[1:] * 8 * _BLOCK_WORDS).tolist(), strict=True)
    if rests := [data[at + matrix.nbytes : end] for at, matrix, end in ends if at + matrix.nbytes < end]:
        torch._foreach_zero_(rests)  # pyright: ignore[reportPrivateImportUsage]
    sums = (data.view(torch.int64).view(-1, _BLOCK_WORDS) * _weights(_BLOCK_WORDS, device)).sum(1)
    owner = np.repeat(np.arange(len(counts)), counts)
    within = torch.from_numpy(np.arange(len(owner)) - starts[owner]).to(device)
    weighted = sums * _block_weights(max(counts), device)[within]
    lengths = torch.tensor([matrix.nbytes for matrix in matrices]).to(device)
    return lengths.index_add_(0, torch.from_numpy(owner).to(device), weighted)


def _copy_into(data: torch.Tensor, begins: Sequence[int], matrices: Sequence[torch.Tensor]) -> None:
    """Copy the matrices to their places in flat uint8 data: contiguous ones in one call per dtype."""
    together: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for at, matrix in zip(begins, matrices, strict=True):
        place = data[at : at + matrix.nbytes].view(matrix.dtype).view(matrix.shape)
        if not matrix.is_contiguous():
            place.copy_(matrix)
            continue
        places, sources = together.setdefault(matrix.dtype, ([], []))
        places.append(place)
        sources.append(matrix)
    for places, sources in together.values():
        torch._foreach_copy_(places, sources)  # pyright: ignore[reportPrivateImportUsage]
