"""DeepSeek-V3 (arXiv 2412.19437): Hugging Face config -> Megatron's transformer settings.

Owns the meaning of config.json's keys for the engine; names and boxes are in deepseek_v3_names.py, what is refused in
unsupported.py.
"""

from __future__ import annotations

from typing import Any

from mrl.models import rope
from mrl.models.deepseek_v3_names import is_moe_layer
from mrl.models.hf_config import HfConfig, field
from mrl.models.settings import common_fields, moe_layer_freq


def transformer_fields(hf: HfConfig) -> dict[str, Any]:
    """Arguments of megatron's MLATransformerConfig that describe the model (not the layout)."""
    return common_fields(hf) | _attention_fields(hf) | _expert_fields(hf)


def _attention_fields(hf: HfConfig) -> dict[str, Any]:
    yarn = rope.parameters(hf) if rope.kind(hf) == "yarn" else {}
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": field(hf, "num_attention_heads"),
        "kv_channels": field(hf, "v_head_dim"),
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": field(hf, "kv_lora_rank"),
        "qk_head_dim": field(hf, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": field(hf, "qk_rope_head_dim"),
        "v_head_dim": field(hf, "v_head_dim"),
        # Of the rotary settings Megatron uses these two, for the softmax scale; the angles are rotary.py's.
        "rope_type": "rope",
        "rotary_scaling_factor": yarn.get("factor", 1.0),
        "mscale_all_dim": yarn.get("mscale_all_dim") or 0.0,
    }


def _expert_fields(hf: HfConfig) -> dict[str, Any]:
    inner, shared = field(hf, "moe_intermediate_size"), hf.get("n_shared_experts") or 0
    groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
    fields = {
        "num_moe_experts": field(hf, "n_routed_experts", "num_local_experts"),
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": inner * shared or None,
        "moe_layer_freq": moe_layer_freq(hf, is_moe_layer),
        "moe_router_topk": field(hf, "num_experts_per_tok"),
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # Pre-training moves the biases against the load; here they stay what the checkpoint says.
        "moe_router_bias_update_rate": 0.0,
    }
    if groups != chosen:  # with all groups chosen there is no limit
        fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return fields


def rotary(hf: HfConfig) -> rope.Rope:
    """The rotary embedding, over the part of queries and keys that has one."""
    return rope.rope(hf, width=field(hf, "qk_rope_head_dim"))
