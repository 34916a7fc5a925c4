"""SwiGLU experts of a rank in two grouped matrix products, in torch alone; gpt-oss's too, which have biases and
clamped inner values.

Tokens arrive sorted by expert. The parameters' shapes, their checkpoint and their place in Megatron's layer
are models/megatron/expert_layer.py's.
"""

from __future__ import annotations

import dataclasses
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
    gate, up = _grouped(hidden, weight1, tokens_per_expert).chunk(2, dim=-1)
    weighted = functional.silu(gate) * up * probs.unsqueeze(-1)
    return _grouped(weighted.to(hidden.dtype), weight2, tokens_per_expert)


@dataclasses.dataclass(frozen=True, slots=True)
class Clamped:
    """gpt-oss's activation of gate and up (transformers 5.19, models/gpt_oss): gate x sigmoid(`alpha` x gate) x
    (up + 1), where gate is at most `limit` and up between -`limit` and `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid() * (up + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Biases:
    """What experts add to their two products: [E, 2I] and [E, H]."""

    first: Tensor
    second: Tensor


def grouped_clamped(
    hidden: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    biases: Biases,
    tokens_per_expert: Tensor,
    probs: Tensor,
    activation: Clamped,
) -> Tensor:
    """grouped_swiglu() of experts with biases, another activation, and rows of gate and up by turns."""
    counts = tokens_per_expert.to(hidden.device)
    first, second = (
        bias.repeat_interleave(counts, dim=0, output_size=len(hidden))
        for bias in (biases.first, biases.second)
    )
    inner = _grouped(hidden, weight1, tokens_per_expert) + first
    weighted = activation(inner[:, 0::2], inner[:, 1::2]) * probs.unsqueeze(-1)
    out = _grouped(weighted.to(hidden.dtype), weight2, tokens_per_expert)
    return (out + second * probs.unsqueeze(-1)).to(hidden.dtype)


def _grouped(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """[n, O] of rows [n, K], sorted by expert, and weight [E, O, K]."""
    if not len(rows):  # no grouped product of nothing: one expert's plain product of no row
        return rows @ weight[0].t()
    ends = tokens_per_expert.cumsum(0).to(rows.device, torch.int32)
    return functional.grouped_mm(rows, _Visited.apply(weight, tokens_per_expert).transpose(1, 2), offs=ends)


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
