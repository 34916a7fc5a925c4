"""Dense Qwen2 and Qwen2.5 (arXiv 2412.15115) and Qwen2-MoE (arXiv 2407.10671): grouped-query attention with
QKV biases; in the MoE, a gated shared expert besides the routed ones."""

from __future__ import annotations

from mrl.models.families.qwen3 import Qwen3Moe
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig, field


class Qwen2(Family):
    """Dense Qwen2 and Qwen2.5."""

    model_type = "qwen2"
    implemented = {"use_sliding_window": (None, False), "use_mrope": (None, False)}
    harmless = ("sliding_window", "max_window_layers")
    rope_kinds = ("default", "yarn")

    def qkv_bias(self, hf: HfConfig) -> bool:
        return True


class Qwen2Moe(Qwen3Moe):
    """Qwen2-MoE and Qwen1.5-MoE: Qwen3-MoE with QKV biases and a shared expert, without q and k norms."""

    model_type = "qwen2_moe"
    implemented = {"use_sliding_window": (None, False), "qkv_bias": (None, True)}
    shared_module = "shared_expert"
    gated_shared = True

    def qk_norm(self, hf: HfConfig) -> bool:
        return False

    def qkv_bias(self, hf: HfConfig) -> bool:
        return True

    def shared_width(self, hf: HfConfig) -> int:
        return field(hf, "shared_expert_intermediate_size")
