"""Qwen3-MoE and dense Qwen3: Hugging Face config -> Megatron's transformer settings.

Owns the meaning of config.json's keys for the engine; names and boxes are in qwen3_names.py, what is refused in
unsupported.py.
"""

from __future__ import annotations

from typing import Any

from mrl.models.hf_config import HfConfig, field, head_dim
from mrl.models.qwen3_names import is_moe_layer
from mrl.models.rope import Rope, rope
from mrl.models.settings import common_fields, moe_layer_freq


def transformer_fields(hf: HfConfig) -> dict[str, Any]:
    """Arguments of megatron's TransformerConfig that describe the model (not the layout)."""
    fields = common_fields(hf) | {
        "num_query_groups": field(hf, "num_key_value_heads"),
        "kv_channels": head_dim(hf),
        "qk_layernorm": True,
    }
    return fields | _expert_fields(hf) if hf["model_type"] == "qwen3_moe" else fields


def _expert_fields(hf: HfConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": field(hf, "num_experts", "num_local_experts"),
        "moe_ffn_hidden_size": field(hf, "moe_intermediate_size"),
        "moe_router_topk": field(hf, "num_experts_per_tok"),
        "moe_layer_freq": moe_layer_freq(hf, is_moe_layer),
        "moe_router_score_function": "softmax",
        # HF: softmax over all experts, top-k, divided by its sum if norm_topk_prob. Dividing by the sum is the same
        # as a softmax over the chosen logits, which is what megatron does without pre-softmax.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
    }


def rotary(hf: HfConfig) -> Rope:
    """The rotary embedding, over whole heads."""
    return rope(hf, width=head_dim(hf))
