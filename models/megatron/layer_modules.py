"""Modules that the layer specs use in place of Megatron's or Transformer Engine's: the norm, the MoE layer and
its router.

None knows a family. The attention is in packed_attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    The torch norm that megatron falls back to refuses sequence parallelism; this one marks its weight, so
    that its gradient is summed over the tensor-parallel ranks. A zero-centred weight, as config says, is what the
    factor has beyond 1.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centred else torch.ones
        self.weight: Any = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centred:
            wide = torch.promote_types(x.dtype, torch.float32)
            factor = 1 + self.weight.to(wide)
            return torch.nn.functional.rms_norm(x.to(wide), factor.shape, factor, self.eps).to(x.dtype)
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ForgetfulMoELayer(MoELayer):
    """Megatron's MoE layer, whose dispatcher keeps nothing of a microbatch that has passed.

    Megatron's keeps the routing probabilities until the next microbatch, and with them the graph that made
    them. With activations recomputed that graph ends in the layer's recomputed input, so that input and its
    gradient, two hidden states a layer, stay through the update and beyond (NVIDIA/Megatron-LM issue 3221).
    """

    def postprocess(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().postprocess(*args, **kwargs)
        dispatcher = self.token_dispatcher
        for keeper in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            held = {} if keeper is None else vars(keeper)
            with_graph = [n for n, value in held.items() if isinstance(value, Tensor) and value.grad_fn]
            held.update(dict.fromkeys(with_graph))
        return output


class RecordingRouter(TopKRouter):
    """Megatron's top-k router that can also record how close each decision was, and count what was chosen.

    While `margins` is a list, each call appends [tokens] float32: the smallest gap of what the choice
    compares. A gap near 0 means that rounding may choose another expert. Softmax routing compares logits (the
    scores are in the same order); with sigmoid scores it is scores plus correction biases, first of groups
    (the sum of a group's two best), where their number is limited, then of the experts in the chosen groups.

    While `counted` is a mask [tokens], each call adds the choices of the tokens in it to `visits` [experts]
    int64.
    """

    margins: list[Tensor] | None = None
    counted: Tensor | None = None
    visits: Tensor

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.margins is not None:
            self.margins.append(self._smallest_gap(logits.detach().view(-1, logits.shape[-1])))
        weights, chosen = super().routing(logits, padding_mask)
        if self.counted is not None:
            self.visits += (chosen & self.counted[:, None]).sum(0)
        return weights, chosen

    def _smallest_gap(self, logits: Tensor) -> Tensor:
        """[tokens] of logits [tokens, experts]; infinite where there is nothing to choose."""
        if self.score_function == "softmax":
            return choice_gap(logits, self.topk)
        scores = logits.float().sigmoid()
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        groups, chosen = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if groups is None or chosen is None:
            return choice_gap(scores, self.topk)
        by_group = scores.unflatten(-1, (groups, -1))
        group_scores = by_group.topk(self.topk // chosen, dim=-1).values.sum(-1)
        outside = torch.ones_like(group_scores, dtype=torch.bool)
        outside.scatter_(1, group_scores.topk(chosen, dim=-1).indices, False)
        inside = by_group.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
        return torch.minimum(choice_gap(group_scores, chosen), choice_gap(inside, self.topk))


def choice_gap(scores: Tensor, count: int) -> Tensor:
    """[rows] float32 gap between the count-th and the next largest of scores [rows, n]; infinite where count
    is n.

    >>> choice_gap(torch.tensor([[4.0, 1.0, 2.5]]), 2)
    tensor([1.5000])
    """
    if count >= scores.shape[-1]:
        return scores.new_full(scores.shape[:1], float("inf"), dtype=torch.float32)
    top = scores.topk(count + 1, dim=-1).values
    return (top[:, -2] - top[:, -1]).float()
