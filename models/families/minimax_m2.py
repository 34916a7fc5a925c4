"""MiniMax-M2: norms over all heads of queries and of keys, half of each head rotated, experts in every layer,
sigmoid routing with correction biases.

Source: transformers 5.19, models/minimax_m2. Draft heads are not trained or served.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.models import rope
from mrl.models.engine_rows import EngineRows
from mrl.models.families.mixtral import PROJECTIONS
from mrl.models.families.projection_normed import ProjectionNormed, normed_heads
from mrl.models.hf_config import HfConfig
from mrl.models.sigmoid_moe import SIGMOID
from mrl.models.tensors import LocalTensor


class MiniMaxM2(ProjectionNormed):
    """MiniMax-M2. vLLM reads the names of routing and norms from config.json, so they are required."""

    model_type = "minimax_m2"
    moe_module = "block_sparse_moe"
    projections = PROJECTIONS
    router = SIGMOID
    prediction_layers = "num_mtp_modules"
    correction = "e_score_correction_bias"
    engine_router_dtype = "float32"
    expert_count_keys = ("num_local_experts", "num_experts")
    expert_width_key = "intermediate_size"
    fewest_experts_per_token = 2
    partial_rotary = True
    implemented = {
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (None, True),
        "qk_norm_type": (None, "per_layer"),
        "shared_intermediate_size": (None, 0),
        "sliding_window": (None,),
        "router_jitter_noise": (None, 0),
    }
    harmless = ("use_mtp", "mtp_transformer_layers", "shared_moe_mode")
    without_drafts = {"num_mtp_modules": 0, "use_mtp": False}

    def unsupported(self, hf: HfConfig) -> list[str]:
        problems = super().unsupported(hf)
        if any(kind != 1 for kind in hf.get("attn_type_list") or []):
            problems.append("attn_type_list with values other than 1 (supported: softmax attention)")
        return problems

    def rotary(self, hf: HfConfig) -> rope.Rope:
        """Return the rotary embedding; published folders set its width only by `rotary_dim`."""
        if hf.get("rotary_dim") and "partial_rotary_factor" not in rope.rope_settings(hf):
            return rope.rope(hf, width=hf["rotary_dim"])
        return super().rotary(hf)

    def engine_attention(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        """Yield the attention's tensors; a rank has the norm weights of its own heads."""
        yield from super().engine_attention(hf, layer, engine)
        for part, heads, width in normed_heads(hf):
            name = f"{layer}.self_attn.{part}_norm.weight"
            yield engine.stacked(name, [(name, heads * width, heads)])
