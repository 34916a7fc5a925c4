"""A fast fingerprint of bytes where they are: XXH3 on CPUs, a sum of products on devices. Not cryptographic.

Guards against faults (a flipped bit, a lost or swapped piece), not against an adversary. Both ends of a link are memory of
one kind, so both compute the same one.
"""

from __future__ import annotations

import functools

import torch
import xxhash

_BLOCK_WORDS = 1 << 15
_MASK = (1 << 64) - 1
_PRIME = 0x9E3779B97F4A7C15


def digest(data: torch.Tensor) -> int:
    """64-bit fingerprint of a contiguous uint8 tensor of any length."""
    assert data.dtype == torch.uint8 and data.is_contiguous() and data.ndim == 1
    if data.device.type != "cpu":
        return weighted_sum(data)
    return xxhash.xxh3_64_intdigest(data.numpy())  # type: ignore[arg-type]


def weighted_sum(data: torch.Tensor) -> int:
    """The fingerprint that vectorised arithmetic of any device computes, position by position.

    With 8-byte words x in blocks of 2^15: s_b = sum_j x_bj w_j, result = sum_b s_b v_b + tail + length, modulo 2^64.
    All weights are odd and pseudo-random, so every single-bit change changes the result.
    """
    num_words = data.numel() // 8
    whole, rest = data[: num_words * 8].view(torch.int64), data[num_words * 8 :]
    tail = int.from_bytes(bytes(rest.tolist()), "little") * _PRIME
    num_blocks = whole.numel() // _BLOCK_WORDS
    weights = _weights(_BLOCK_WORDS, data.device)
    sums = [
        (whole[b * _BLOCK_WORDS : (b + 1) * _BLOCK_WORDS] * weights).sum(0, keepdim=True)
        for b in range(num_blocks)
    ]
    short = whole[num_blocks * _BLOCK_WORDS :]
    sums.append((short * weights[: short.numel()]).sum(0, keepdim=True))
    blocks = torch.cat(sums)
    total = int((blocks * _block_weights(len(sums), data.device)).sum())
    return (total + tail + data.numel()) & _MASK


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
