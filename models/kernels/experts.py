"""Compute a rank's SwiGLU experts in two grouped matrix products, in torch alone, also gpt-oss's with biases
and clamping.

Tokens arrive sorted by expert. models/megatron/expert_layer.py defines the parameters' shapes, their
checkpoint and their place in Megatron's layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

ALIGNED_BYTES = 16
"""Row lengths must be a multiple of this for torch.nn.functional.grouped_mm."""


def grouped_swiglu(
    hidden: Tensor, weight1: Tensor, weight2: Tensor, tokens_per_expert: Tensor, probs: Tensor
) -> Tensor:
    """Apply to each token its expert, weighted by its prob; return [n, H].

    `hidden` [n, H] is sorted by expert, `tokens_per_expert` [E] are integers with sum n, `probs` is [n]. Per
    expert, `weight1` [E, 2I, H] has I rows of gate, then I of up; `weight2` is [E, H, I]. Experts without
    tokens get gradients of exactly zero on every device; n may be 0.
    """
    gate, up = _grouped(hidden, weight1, tokens_per_expert).chunk(2, dim=-1)
    weighted = functional.silu(gate) * up * probs.unsqueeze(-1)
    return _grouped(weighted.to(hidden.dtype), weight2, tokens_per_expert)


@dataclasses.dataclass(frozen=True, slots=True)
class Clamped:
    """gpt-oss's activation (transformers 5.19, models/gpt_oss): gate x sigmoid(`alpha` x gate) x (up + 1),
    with gate at most `limit` and up in [-`limit`, `limit`]."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid() * (up + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Biases:
    """Biases of the experts' two products: [E, 2I] and [E, H]."""

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
    """Compute grouped_swiglu() with biases, another activation, and gate and up rows interleaved."""
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
    """Return [n, O] of rows [n, K], sorted by expert, and weight [E, O, K]."""
    if not len(rows):  # there is no grouped product without rows: use a plain one
        return rows @ weight[0].t()
    ends = tokens_per_expert.cumsum(0).to(rows.device, torch.int32)
    return functional.grouped_mm(rows, _Visited.apply(weight, tokens_per_expert).transpose(1, 2), offs=ends)


class _Visited(torch.autograd.Function):
    """Identity of the weights whose backward sets the gradients of experts without tokens to zero.

    On some devices CUDA's grouped product leaves uninitialised memory in the gradients of empty groups
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
