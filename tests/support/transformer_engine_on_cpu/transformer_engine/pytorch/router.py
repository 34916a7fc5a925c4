"""Choose experts in one call, in float32."""

import torch
from torch import Tensor


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """logits [n, E] -> (probs [n, E], 0 for experts not chosen; map [n, E] bool)."""
    if logits.dtype == torch.float64:
        raise ValueError("float64 is not supported")
    assert score_function in ("softmax", "sigmoid")
    values = logits.float()
    pre = score_function == "sigmoid" or use_pre_softmax
    scores = (values.sigmoid() if score_function == "sigmoid" else values.softmax(-1)) if pre else values
    chosen = _chosen(scores if expert_bias is None else scores + expert_bias, topk, num_groups, group_topk)
    weights = scores.gather(1, chosen)
    if not pre:
        weights = weights.softmax(-1)
    elif score_function == "sigmoid" and topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = (weights * (scaling_factor or 1.0)).to(logits.dtype)
    probs = torch.zeros_like(logits).scatter(1, chosen, weights)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


def _chosen(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    if not group_topk or not num_groups:
        return scores.topk(topk, dim=-1).indices
    by_group = scores.unflatten(-1, (num_groups, -1))
    groups = by_group.topk(topk // group_topk, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
    outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, groups, False)
    return by_group.masked_fill(outside[..., None], float("-inf")).flatten(1).topk(topk, dim=-1).indices


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("not used: the load-balancing loss is Megatron's")


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Tensor:
    raise NotImplementedError("not used: the load-balancing loss is Megatron's")
