"""GLM-4.5 to 4.7 (arXiv 2508.06471): attention with biases, half of each head rotated, query and key norms in
the larger model, DeepSeek-V3's routing; and GLM-4.7-Flash, which also has DeepSeek-V3's attention.

vLLM keeps their routers in float32, whatever the model's type.
"""

from __future__ import annotations

from mrl.models import rope
from mrl.models.families.deepseek_v3 import DeepseekV3
from mrl.models.hf_config import HfConfig, field, head_dim
from mrl.models.sigmoid_moe import SigmoidMoe

TURNED = 0.5
"""Share of a head that is rotated if config.json does not set it."""


class Glm4Moe(SigmoidMoe):
    """GLM-4.5, 4.6 and 4.7."""

    model_type = "glm4_moe"
    engine_router_dtype = "float32"
    partial_rotary = True
    implemented = {**SigmoidMoe.implemented, "attention_bias": (None, False, True)}

    def qk_norm(self, hf: HfConfig) -> bool:
        return bool(hf.get("use_qk_norm"))

    def qkv_bias(self, hf: HfConfig) -> bool:
        return bool(hf.get("attention_bias"))

    def rotary(self, hf: HfConfig) -> rope.Rope:
        return rope.rope(hf, width=int(head_dim(hf) * rope.rotary_share(hf, default=TURNED)))


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: DeepSeek-V3's layers, whose routing vLLM and transformers assume."""

    model_type = "glm4_moe_lite"
    engine_router_dtype = "float32"
    aliases = ()
    implemented = {
        **DeepseekV3.implemented,
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
    }

    def unsupported(self, hf: HfConfig) -> list[str]:
        numbers = range(field(hf, "num_hidden_layers"))
        kinds = ["sparse" if self.is_moe_layer(hf, number) else "dense" for number in numbers]
        if hf.get("mlp_layer_types", kinds) == kinds:
            return super().unsupported(hf)
        return [
            *super().unsupported(hf),
            "mlp_layer_types (supported: those of first_k_dense_replace, which vLLM reads)",
        ]
