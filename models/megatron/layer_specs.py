"""Megatron's layer specs with our norm, attention, router and experts in them. Knows no family: megatron's
config says it all."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.models.megatron.experts import GroupedExperts
from mrl.models.megatron.latent_attention import PackedLatentAttention
from mrl.models.megatron.layer_modules import RecordingRouter, RMSNorm
from mrl.models.megatron.packed_attention import core_attention


def block_spec(config: TransformerConfig, layers: range, device: torch.device) -> Any:
    """The (global) layers of one model chunk, as TransformerBlockSubmodules."""
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(
        [_layer_spec(config, layer, device) for layer in layers], layer_norm=norm
    )


def _layer_spec(config: TransformerConfig, layer: int, device: torch.device) -> ModuleSpec:
    pattern = config.moe_layer_freq
    is_moe = bool(config.num_moe_experts) and (not isinstance(pattern, list) or bool(pattern[layer]))
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention
    attention.submodules.core_attention = core_attention(device)
    if config.multi_latent_attention:
        attention.module = PackedLatentAttention
        attention.submodules.kv_layernorm = RMSNorm
        # without a compressed query there is nothing to norm, and Megatron refuses a norm for it
        is_compressed = getattr(config, "q_lora_rank", None) is not None
        attention.submodules.q_layernorm = RMSNorm if is_compressed else None
    elif config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    if is_moe:
        moe = parts.mlp.keywords["submodules"]
        own = dataclasses.replace(moe, router=RecordingRouter, experts=GroupedExperts)
        parts.mlp = functools.partial(parts.mlp, submodules=own)
    return spec
