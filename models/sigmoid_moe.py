"""Share what DeepSeek-V3 (arXiv 2412.19437) and GLM-4.5 (arXiv 2508.06471) have in common.

Dense first layers, experts chosen by sigmoid scores plus correction biases, shared experts, and draft heads.
A family's file adds the rest, above all its attention. This module imports no engine.
"""

from __future__ import annotations

from typing import Any

from mrl.models.family import EMBEDDING, HEAD, Family
from mrl.models.hf_config import HfConfig, field

SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    # Otherwise Megatron would update the biases with every reduction of gradients, counting padding.
    "moe_router_bias_update_rate": 0.0,
}


class SigmoidMoe(Family):
    """A family whose routers are DeepSeek-V3's."""

    router = SIGMOID
    prediction_layers = "num_nextn_predict_layers"
    correction = "gate.e_score_correction_bias"
    expert_count_keys = ("n_routed_experts", "num_local_experts")
    fewest_experts_per_token = 2
    implemented = {"norm_topk_prob": (True,)}
    draft_names = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "final_norm": "shared_head.norm",
    }
    draft_copies = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
    without_drafts = {"num_nextn_predict_layers": 0}

    def is_moe_layer(self, hf: HfConfig, number: int) -> bool:
        """Return True if a layer has experts, by `first_k_dense_replace` and `moe_layer_freq`."""
        return number >= hf.get("first_k_dense_replace", 0) and number % hf.get("moe_layer_freq", 1) == 0

    def unsupported(self, hf: HfConfig) -> list[str]:
        groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
        experts, problems = field(hf, "num_experts_per_tok"), super().unsupported(hf)
        if groups != chosen and experts // chosen != 2:
            # A group is scored by its two best experts; Megatron uses num_experts_per_tok // topk_group.
            problems.append(
                f"num_experts_per_tok = {experts} with topk_group = {chosen} (supported: two experts per "
                "group)"
            )
        return problems

    def shared_width(self, hf: HfConfig) -> int:
        return field(hf, "moe_intermediate_size") * (hf.get("n_shared_experts") or 0)

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
        fields = super().transformer_fields(hf) | {
            "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0)
        }
        if groups != chosen:  # choosing all groups limits nothing
            fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
        return fields
