"""Mixtral (arXiv 2401.04088): grouped-query attention without norms of its own, experts in every layer,
softmax routing."""

from __future__ import annotations

from typing import Any

from mrl.config.sections.model import NewModelSection
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig

PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}


class Mixtral(Family):
    """Mixtral."""

    model_type = "mixtral"
    moe_module = "block_sparse_moe"
    expert_count_keys = ("num_local_experts",)
    expert_width_key = "intermediate_size"
    fewest_experts_per_token = 2
    implemented = {"sliding_window": (None,), "router_jitter_noise": (None, 0)}

    def expert_name(self, layer: str, expert: int, part: str) -> str:
        return f"{layer}.{self.moe_module}.experts.{expert}.{PROJECTIONS[part]}.weight"

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        return super().transformer_fields(hf) | {
            # HF divides the chosen probabilities by their sum, which is a softmax over the chosen logits.
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,
        }

    def new_fields(self, new: NewModelSection, max_length: int) -> dict[str, Any]:
        return {
            "intermediate_size": new.expert_size,
            "num_local_experts": new.num_experts,
            "num_experts_per_tok": new.num_experts_per_token,
        }
