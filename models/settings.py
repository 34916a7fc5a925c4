"""Arguments of megatron's TransformerConfig that several families read from config.json in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mrl.models.hf_config import HfConfig, field


def common_fields(hf: HfConfig) -> dict[str, Any]:
    """Sizes of the block, pre-norms and gated SiLU; nothing of the attention but its number of heads."""
    return {
        "num_layers": field(hf, "num_hidden_layers"),
        "hidden_size": field(hf, "hidden_size"),
        "num_attention_heads": field(hf, "num_attention_heads"),
        "ffn_hidden_size": field(hf, "intermediate_size"),
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "init_method_std": hf.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def moe_layer_freq(hf: HfConfig, is_moe_layer: Callable[[HfConfig, int], bool]) -> int | list[int]:
    """1 where every layer has experts, else 1 or 0 for each layer."""
    pattern = [int(is_moe_layer(hf, layer)) for layer in range(field(hf, "num_hidden_layers"))]
    return 1 if all(pattern) else pattern
