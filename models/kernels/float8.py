"""What the numbers of float8 tensors mean, of which each square block (BLOCK of models/tensors.py) has a scale."""

from __future__ import annotations

from torch import Tensor

from mrl.models.tensors import BLOCK


def dequantise_float8(values: Tensor, scales: Tensor, start: tuple[int, int] = (0, 0)) -> Tensor:
    """[..., rows, columns] float32 of the float8 values of a box and the scales of the blocks that it touches. `start`: the
    row and the column of its tensor where the box begins.

    >>> import torch
    >>> widened(torch.ones(1, 3), torch.tensor([[2.0, 4.0]]), (5, BLOCK - 1)).tolist()
    [[2.0, 4.0, 4.0]]
    """
    scales = scales.float()
    for axis, first in zip((-2, -1), start, strict=True):
        scales = scales.repeat_interleave(BLOCK, axis).narrow(axis, first % BLOCK, values.shape[axis])
    return values.float() * scales
