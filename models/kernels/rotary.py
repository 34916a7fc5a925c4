"""Compute the rotary embedding's cosines and sines, and rotate heads in its two ways.

rope.py reads the settings from config.json.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.models.rope import Llama3, Rope, Yarn


def inverse_frequencies(rope: Rope) -> Tensor:
    """Return [width / 2] float32 angles per position, as `transformers` computes them."""
    powers = rope.theta ** (torch.arange(0, rope.width, 2, dtype=torch.int64).float() / rope.width)
    if isinstance(rope.scaling, Yarn):
        return _yarn(powers, rope.scaling)
    return 1.0 / powers if rope.scaling is None else _llama3(1.0 / powers, rope.scaling)


def _yarn(powers: Tensor, scaling: Yarn) -> Tensor:
    span = scaling.high - scaling.low or 0.001
    interpolated = ((torch.arange(len(powers), dtype=torch.float32) - scaling.low) / span).clamp(0, 1)
    kept = 1 - interpolated
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(frequencies: Tensor, scaling: Llama3) -> Tensor:
    turn = 2 * math.pi / frequencies
    is_long, is_short = turn > scaling.length / scaling.low, turn < scaling.length / scaling.high
    kept = (scaling.length / turn - scaling.low) / (scaling.high - scaling.low)
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    return frequencies.where(is_short, blended.where(~is_long, frequencies / scaling.factor))


class RotaryTable:
    """Cosines and sines of all positions, computed in float32."""

    angles: Tensor | None
    """[positions, 1, 1, D] float32, halves equal, for Transformer Engine; None if scaled (YaRN)."""
    query_factors: Tensor | None = None
    """[positions, 1, 1] float32 factors of rotated queries; None if all are 1."""

    def __init__(self, rope: Rope, *, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.arange(max_length).float()[:, None] * inverse_frequencies(rope)[None, :]
        self.cos = (angles.cos() * rope.scale).to(device, dtype)
        self.sin = (angles.sin() * rope.scale).to(device, dtype)
        self.angles = angles.repeat(1, 2)[:, None, None].to(device) if rope.scale == 1.0 else None
        if growth := rope.query_growth:
            lengths = torch.arange(max_length).div(growth.length, rounding_mode="floor")
            self.query_factors = (1 + growth.beta * torch.log1p(lengths))[:, None, None].to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, sin [N, 1, D / 2] at [N] positions."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, H, W] by cos, sin [N, 1, D / 2]: dimension i with i + D / 2; keep those from D on."""
    half = cos.shape[-1]
    first, second, unrotated = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((*_turned(first, second, cos, sin), unrotated), dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, H, D] by cos, sin [N, 1, D / 2]: dimension 2i with 2i + 1.

    The result has the even dimensions, then the odd ones, for queries and keys alike, so products are
    unaffected.
    """
    return torch.cat(_turned(x[..., 0::2], x[..., 1::2], cos, sin), dim=-1)


def _turned(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return first * cos - second * sin, second * cos + first * sin
