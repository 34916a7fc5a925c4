"""What the numbers of mxfp4 (models/microscaling.py) mean."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1 without its sign, which is the highest of four bits."""
_BIAS = 127
"""Of E8M0."""


def dequantise_microscaled(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, columns] float32 of uint8 blocks [rows, columns / 32, 16] and scales [rows, columns / 32]; bfloat16 holds
    them exactly.

    >>> widened(torch.tensor([[[0x21, 0xF0, *[0] * 14]]], dtype=torch.uint8), torch.tensor([[128]]))[0, :4].tolist()
    [1.0, 2.0, 0.0, -12.0]
    """
    numbers = torch.tensor([*_MAGNITUDES, *(-size for size in _MAGNITUDES)])
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(numbers[halves.int()], scales.int().unsqueeze(-1) - _BIAS).flatten(-2)
