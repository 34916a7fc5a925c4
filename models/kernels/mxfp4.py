"""Dequantise mxfp4 (models/mxfp4.py)."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 without its sign, which is the highest of four bits."""
_BIAS = 127
"""Exponent bias of E8M0."""


def dequantise_microscaled(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [rows, columns] float32 of uint8 blocks [rows, columns / 32, 16] and a scale per block.

    bfloat16 represents the values exactly.

    >>> blocks = torch.tensor([[[0x21, 0xF0, *[0] * 14]]], dtype=torch.uint8)
    >>> dequantise_microscaled(blocks, torch.tensor([[128]]))[0, :4].tolist()
    [1.0, 2.0, 0.0, -12.0]
    """
    numbers = torch.tensor([*_MAGNITUDES, *(-size for size in _MAGNITUDES)])
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(numbers[halves.int()], scales.int().unsqueeze(-1) - _BIAS).flatten(-2)
