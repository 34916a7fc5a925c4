"""Merge a weight and its LoRA update into one matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(base: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Return base [m, n] + scale b [m, r] a [r, n], summed in float32, in the base's type.

    Elements without a change keep their bits.

    >>> merged(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0]]), scale=0.5)
    tensor([[1.5000, 0.0000]])
    """
    change = torch.mm(b.float(), a.float()).mul_(scale)
    return torch.where(change == 0, base, (base.float() + change).to(base.dtype))
