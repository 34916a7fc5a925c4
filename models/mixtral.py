"""Mixtral: Hugging Face config -> Megatron's transformer settings.

Owns the meaning of config.json's keys for the engine; names and boxes are in mixtral_names.py, what is refused in
unsupported.py.
"""

from __future__ import annotations

from typing import Any

from mrl.models.hf_config import HfConfig, field, head_dim
from mrl.models.rope import Rope, rope
from mrl.models.settings import common_fields


def transformer_fields(hf: HfConfig) -> dict[str, Any]:
    """Arguments of megatron's TransformerConfig that describe the model (not the layout); every layer has experts."""
    return common_fields(hf) | {
        "num_query_groups": field(hf, "num_key_value_heads"),
        "kv_channels": head_dim(hf),
        "qk_layernorm": False,
        "num_moe_experts": field(hf, "num_local_experts"),
        "moe_ffn_hidden_size": field(hf, "intermediate_size"),
        "moe_router_topk": field(hf, "num_experts_per_tok"),
        # HF divides the chosen probabilities by their sum, which is a softmax over the chosen logits.
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
    }


def rotary(hf: HfConfig) -> Rope:
    """The rotary embedding, over whole heads."""
    return rope(hf, width=head_dim(hf))
