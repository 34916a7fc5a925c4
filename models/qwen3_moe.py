"""Qwen3-MoE and dense Qwen3: Hugging Face config -> Megatron's transformer settings.

Owns the meaning of config.json's keys for the engine; names and boxes are in qwen3_names.py. Keys that would change the
computation and are not implemented are errors, never ignored.
"""

from __future__ import annotations

from typing import Any

import torch

from models.layer_rows import HfConfig, field, head_dim
from models.qwen3_names import is_moe_layer
from mrl.errors import ConfigError


def transformer_fields(hf: HfConfig) -> dict[str, Any]:
    """Arguments of megatron's TransformerConfig that describe the model (not the layout)."""
    _refuse_unsupported(hf)
    fields: dict[str, Any] = {
        "num_layers": field(hf, "num_hidden_layers"),
        "hidden_size": field(hf, "hidden_size"),
        "num_attention_heads": field(hf, "num_attention_heads"),
        "num_query_groups": field(hf, "num_key_value_heads"),
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": field(hf, "intermediate_size"),
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "init_method_std": hf.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if hf["model_type"] == "qwen3_moe":
        fields |= _expert_fields(hf)
    return fields


def _expert_fields(hf: HfConfig) -> dict[str, Any]:
    pattern = [int(is_moe_layer(hf, layer)) for layer in range(field(hf, "num_hidden_layers"))]
    return {
        "num_moe_experts": field(hf, "num_experts", "num_local_experts"),
        "moe_ffn_hidden_size": field(hf, "moe_intermediate_size"),
        "moe_router_topk": field(hf, "num_experts_per_tok"),
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_score_function": "softmax",
        # HF: softmax over all experts, top-k, divided by its sum if norm_topk_prob. Dividing by the sum is the same
        # as a softmax over the chosen logits, which is what megatron does without pre-softmax.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
    }


def rotary_theta(hf: HfConfig) -> float:
    """Base of the rotary embedding; transformers 5 keeps it in `rope_parameters`, 4 at the top."""
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return float(parameters.get("rope_theta") or field(hf, "rope_theta"))


def _refuse_unsupported(hf: HfConfig) -> None:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    found = {
        "rope_type": kind if kind != "default" else None,
        "use_sliding_window": hf.get("use_sliding_window") or None,
        "attention_bias": hf.get("attention_bias") or None,
        "hidden_act": None if hf.get("hidden_act", "silu") == "silu" else hf["hidden_act"],
    }
    if unsupported := {key: value for key, value in found.items() if value is not None}:
        raise ConfigError(f"config.json asks for {unsupported}, which training does not implement for Qwen3")
