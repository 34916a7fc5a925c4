"""Dense Qwen3 and Qwen3-MoE (arXiv 2505.09388): attention with query and key norms, softmax routing; and the
same text models in Qwen3-VL's folders (arXiv 2511.21631).

Of Qwen3-VL only text is trained and served; exports copy the image model unchanged. Text has the same
position in all three sections of its rotary embedding, which is therefore a plain one.
"""

from __future__ import annotations

from typing import Any

from mrl.models.family import Family
from mrl.models.hf_config import HfConfig

IMAGE_KEYS = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
)  # fmt: skip
"""Keys of config.json about images."""


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


class Qwen3VL(Qwen3):
    """Dense Qwen3-VL."""

    model_type = "qwen3_vl"
    aliases = ("qwen3_vl_text",)
    engine_class = "Qwen3ForCausalLM"
    harmless = (*Qwen3.harmless, *IMAGE_KEYS)
    rope_kinds = ("default",)
    copied_prefixes = ("model.visual.",)

    def engine_overrides(self, hf: HfConfig) -> dict[str, Any]:
        """Return the plain rotary embedding: vLLM's text class has no positions of images."""
        return {"rope_parameters": {"rope_type": "default", "rope_theta": self.rotary(hf).theta}}


class Qwen3VLMoe(Qwen3Moe):
    """Qwen3-VL with experts, whose chosen probabilities are always divided by their sum."""

    model_type = "qwen3_vl_moe"
    aliases = ("qwen3_vl_moe_text",)
    engine_class = "Qwen3MoeForCausalLM"
    turned_experts = True
    implemented = {**Qwen3Moe.implemented, "norm_topk_prob": (None, True)}
    harmless = Qwen3VL.harmless
    rope_kinds = Qwen3VL.rope_kinds
    copied_prefixes = Qwen3VL.copied_prefixes

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        return super().transformer_fields(hf) | {"moe_router_pre_softmax": False}

    def engine_overrides(self, hf: HfConfig) -> dict[str, Any]:
        plain = {"rope_type": "default", "rope_theta": self.rotary(hf).theta}
        return {"rope_parameters": plain, "norm_topk_prob": True}
