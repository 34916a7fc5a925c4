"""SwiGLU experts of a rank in two grouped matrix products, in torch alone.

Tokens arrive sorted by expert. The parameters' shapes, their checkpoint and their place in Megatron's layer
are models/megatron/experts.py's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

ALIGNED_BYTES = 16
"""What torch.nn.functional.grouped_mm asks of the length of a row."""


def grouped_swiglu(
    hidden: Tensor, weight1: Tensor, weight2: Tensor, tokens_per_expert: Tensor, probs: Tensor
) -> Tensor:
    """Each token through its expert, weighted by its prob: [n, H].

    `hidden` [n, H] sorted by expert, `tokens_per_expert` [E] integers that add up to n, `probs` [n]. Of each
    expert e, `weight1` [E, 2I, H] holds I rows of gate, then I of up; `weight2` is [E, H, I]. Experts without
    a token get gradients of exact zeros, on every device; n may be 0.
    """
    if not len(hidden):  # no grouped product of nothing: one expert's plain products of no row
        return _weighted(hidden @ weight1[0].t(), probs, hidden.dtype) @ weight2[0].t()
    ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32)
    first, second = (_Visited.apply(weight, tokens_per_expert) for weight in (weight1, weight2))
    inner = functional.grouped_mm(hidden, first.transpose(1, 2), offs=ends)
    return functional.grouped_mm(_weighted(inner, probs, hidden.dtype), second.transpose(1, 2), offs=ends)


def _weighted(inner: Tensor, probs: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, I] of the first product [n, 2I]."""
    gate, up = inner.chunk(2, dim=-1)
    return (functional.silu(gate) * up * probs.unsqueeze(-1)).to(dtype)


class _Visited(torch.autograd.Function):
    """The weights themselves; backward, zeros for experts without a token.

    CUDA's grouped product leaves what was in memory in the gradients of empty groups on some devices
    (pytorch/pytorch issues 172439 and 193633).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_per_expert)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (counts,) = grads, ctx.saved_tensors
        empty = (counts == 0).to(grad.device).view(-1, 1, 1)
        return grad.masked_fill_(empty, 0.0), None
