"""Replace modules of Megatron or Transformer Engine in the layer specs: the norm, the MoE layer and its
router.

They do not depend on a family. The attention is in packed_attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    Megatron's fallback, torch's norm, refuses sequence parallelism. This one marks its weight, so that its
    gradient is summed over the tensor-parallel ranks. With layernorm_zero_centered_gamma the factor is 1 +
    weight.
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


class ReleasingMoELayer(MoELayer):
    """Megatron's MoE layer with a dispatcher that frees everything of a finished micro-batch.

    Megatron's keeps the routing probabilities until the next micro-batch, and with them their autograd graph.
    With recomputed activations that graph ends in the layer's recomputed input. So that input and its
    gradient, two hidden states per layer, stay through the update and longer (NVIDIA/Megatron-LM issue 3221).
    """

    def postprocess(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().postprocess(*args, **kwargs)
        dispatcher = self.token_dispatcher
        for keeper in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            attributes = {} if keeper is None else vars(keeper)
            with_graph = [n for n, value in attributes.items() if isinstance(value, Tensor) and value.grad_fn]
            attributes.update(dict.fromkeys(with_graph))
        return output


class RecordingRouter(TopKRouter):
    """Megatron's top-k router that can also record how close each decision was, and count choices.

    While `margins` is a list, each call appends [tokens] float32: the smallest gap among the compared values.
    With a gap near 0 rounding may choose another expert. Softmax routing compares logits (in the same order
    as scores). Sigmoid routing compares scores plus correction biases: first of groups (the sum of a group's
    two best), if their number is limited, then of the experts in the chosen groups.

    While `counted` is a mask [tokens], each call adds these tokens' choices to `visits` [experts] int64.
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
        """Return [tokens] from logits [tokens, experts]; infinite if all experts are chosen."""
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
    """Return [rows] float32, the gap between the count-th and next largest of scores [rows, n]; inf if count
    is n.

    >>> choice_gap(torch.tensor([[4.0, 1.0, 2.5]]), 2)
    tensor([1.5000])
    """
    if count >= scores.shape[-1]:
        return scores.new_full(scores.shape[:1], float("inf"), dtype=torch.float32)
    top = scores.topk(count + 1, dim=-1).values
    return (top[:, -2] - top[:, -1]).float()
