"""Build Megatron's layer specs with our norm, attention, router and experts. Depends on Megatron's config
only, on no family.

In Transformer Engine's spec only the attention around the core and the router are replaced. Both specs store
checkpoints under the same names, so a run may resume with the other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.models.megatron.clamped_experts import ClampedExperts
from mrl.models.megatron.delta_net_layer import DeltaNetSubmodules, PackedDeltaNet
from mrl.models.megatron.expert_layer import GroupedExperts
from mrl.models.megatron.latent_attention import PackedLatentAttention
from mrl.models.megatron.layer_choice import LayerChoice
from mrl.models.megatron.layer_modules import RecordingRouter, ReleasingMoELayer, RMSNorm
from mrl.models.megatron.model_config import ModelConfig
from mrl.models.megatron.packed_attention import core_attention
from mrl.models.megatron.projection_norm import ProjectionNorm

_STORED_AS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_STORED_AS_LATENT = {
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Prefix of Transformer Engine's parameters -> prefix under which Megatron's local spec stores them."""


def block_spec(config: TransformerConfig, layers: range, choice: LayerChoice) -> Any:
    """Return the (global) layers of one model chunk as TransformerBlockSubmodules."""
    specs = []
    for layer in layers:
        experts, delta_nets = config.moe_layer_freq, config.linear_attention_freq
        is_moe = bool(config.num_moe_experts) and (not isinstance(experts, list) or bool(experts[layer]))
        is_delta_net = isinstance(delta_nets, list) and bool(delta_nets[layer])
        specs.append(layer_spec(config, choice, is_moe=is_moe, is_delta_net=is_delta_net))
    return TransformerBlockSubmodules(specs, layer_norm=norm_of(choice))


def norm_of(choice: LayerChoice) -> Any:
    """Return the class of norms outside of layers."""
    if choice.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def layer_spec(
    config: TransformerConfig, choice: LayerChoice, *, is_moe: bool, is_delta_net: bool = False
) -> ModuleSpec:
    """Return one layer, with experts or a gated MLP, and attention or a delta net."""
    spec = _engine_spec(config, is_moe) if choice.transformer_engine else _local_spec(config, is_moe)
    parts: Any = spec.submodules
    if is_delta_net:
        _take_delta_net(parts, choice)
    else:
        parts.self_attention.submodules.core_attention = core_attention(choice)
    if config.multi_latent_attention:
        parts.self_attention.module = PackedLatentAttention
    elif isinstance(config, ModelConfig) and config.projection_norms:
        norms, groups = parts.self_attention.submodules, config.num_query_groups
        assert groups is not None, "every family sets its number of query groups"
        norms.q_layernorm = functools.partial(ProjectionNorm, heads=config.num_attention_heads)
        norms.k_layernorm = functools.partial(ProjectionNorm, heads=groups)
    if is_moe:
        replacements: dict[str, Any] = {"router": RecordingRouter}
        if isinstance(config, ModelConfig) and config.clamped_swiglu is not None:
            replacements["experts"] = ClampedExperts
        elif not choice.transformer_engine:
            replacements["experts"] = GroupedExperts
        moe = dataclasses.replace(parts.mlp.keywords["submodules"], **replacements)
        parts.mlp = functools.partial(ReleasingMoELayer, **(parts.mlp.keywords | {"submodules": moe}))
    return spec


def _take_delta_net(parts: Any, choice: LayerChoice) -> None:
    """Replace attention by a delta net; the norm before it is never folded into its projection."""
    column: Any = ColumnParallelLinear
    if choice.transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        column, parts.input_layernorm = TEColumnParallelLinear, TENorm
    projections = DeltaNetSubmodules(column, parts.self_attention.submodules.linear_proj)
    fused = {"fused": choice.fused_delta_rule}
    parts.self_attention = ModuleSpec(module=PackedDeltaNet, params=fused, submodules=projections)
    parts.sharded_state_dict_keys_map = _STORED_AS


def _engine_spec(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """Return Transformer Engine's layers, stored as Megatron's local ones are."""
    spec = get_gpt_layer_with_transformer_engine_spec(**_kind(config, is_moe), moe_grouped_gemm=is_moe)
    parts: Any = spec.submodules
    parts.sharded_state_dict_keys_map = _STORED_AS_LATENT if config.multi_latent_attention else _STORED_AS
    return spec


def _local_spec(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """Return Megatron's own layers with our norms."""
    spec = get_gpt_layer_local_spec(**_kind(config, is_moe), moe_grouped_gemm=False, normalization="RMSNorm")
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    norms = parts.self_attention.submodules
    if config.multi_latent_attention:
        norms.kv_layernorm = RMSNorm
        # an uncompressed query has no norm, and Megatron refuses one
        is_compressed = getattr(config, "q_lora_rank", None) is not None
        norms.q_layernorm = RMSNorm if is_compressed else None
    elif config.qk_layernorm:
        norms.q_layernorm = norms.k_layernorm = RMSNorm
    return spec


def _kind(config: TransformerConfig, is_moe: bool) -> dict[str, Any]:
    """Return the arguments of both specs that depend on the layer."""
    return {
        "num_experts": config.num_moe_experts if is_moe else None,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
