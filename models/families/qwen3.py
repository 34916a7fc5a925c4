"""Dense Qwen3 and Qwen3-MoE (arXiv 2505.09388): attention with query and key norms, softmax routing."""

from __future__ import annotations

from typing import Any

from mrl.models.family import Family
from mrl.models.hf_config import HfConfig


class Qwen3(Family):
    """Dense Qwen3."""

    model_type = "qwen3"
    implemented = {"use_sliding_window": (None, False)}
    harmless = ("sliding_window", "max_window_layers")
    rope_kinds = ("default", "yarn")

    def qk_norm(self, hf: HfConfig) -> bool:
        return True


class Qwen3Moe(Qwen3):
    """Qwen3-MoE."""

    model_type = "qwen3_moe"
    expert_count_keys = ("num_experts", "num_local_experts")

    def is_moe_layer(self, hf: HfConfig, number: int) -> bool:
        """Return True if a layer has experts, by `mlp_only_layers` and `decoder_sparse_step`."""
        step = hf.get("decoder_sparse_step", 1)
        return number not in (hf.get("mlp_only_layers") or []) and (number + 1) % step == 0

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        return super().transformer_fields(hf) | {
            # HF: softmax over all experts, then top-k, divided by its sum if norm_topk_prob
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False)
        }
