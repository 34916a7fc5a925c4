"""Dequantise float8 tensors, which have one scale per square block (BLOCK of models/tensors.py)."""

from __future__ import annotations

from torch import Tensor

from mrl.models.tensors import BLOCK


def dequantise_float8(values: Tensor, scales: Tensor, start: tuple[int, int] = (0, 0)) -> Tensor:
    """Return [..., rows, columns] float32 of a box's float8 values and the scales of the blocks it touches.

    `start`: row and column of its tensor at which the box begins.

    >>> import torch
    >>> dequantise_float8(torch.ones(1, 3), torch.tensor([[2.0, 4.0]]), (5, BLOCK - 1)).tolist()
    [[2.0, 4.0, 4.0]]
    """
    scales = scales.float()
    for axis, first in zip((-2, -1), start, strict=True):
        scales = scales.repeat_interleave(BLOCK, axis).narrow(axis, first % BLOCK, values.shape[axis])
    return values.float() * scales
