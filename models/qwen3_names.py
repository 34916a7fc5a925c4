"""Name table of dense Qwen3 and Qwen3-MoE. Pure."""

from __future__ import annotations

from mrl.models.hf_config import HfConfig, field
from mrl.models.layer_rows import dense_mlp, expert_mlps, grouped_query_attention, input_norm, mlp_norm
from mrl.models.tensors import Row, Spec, whole


def is_moe_layer(hf: HfConfig, layer: int) -> bool:
    """Whether a layer of Qwen3-MoE has experts (`mlp_only_layers`, `decoder_sparse_step`)."""
    step = hf.get("decoder_sparse_step", 1)
    return layer not in (hf.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def dense_layer(hf: HfConfig, layer: int, spec: Spec, experts: range) -> list[Row]:
    """One layer of dense Qwen3; `experts` is empty."""
    prefix = f"model.layers.{layer}"
    attention = grouped_query_attention(hf, prefix, qk_norm=True)
    norms = [input_norm(hf, prefix, spec), mlp_norm(hf, prefix, spec, dense=True)]
    return [norms[0], *attention, norms[1], *dense_mlp(hf, prefix)]


def moe_layer(hf: HfConfig, layer: int, spec: Spec, experts: range) -> list[Row]:
    """One layer of Qwen3-MoE with the experts of one rank."""
    if not is_moe_layer(hf, layer):
        return dense_layer(hf, layer, spec, experts)
    prefix = f"model.layers.{layer}"
    hidden = field(hf, "hidden_size")
    router = whole(f"{prefix}.mlp.gate.weight", field(hf, "num_experts", "num_local_experts"))
    return [
        input_norm(hf, prefix, spec),
        *grouped_query_attention(hf, prefix, qk_norm=True),
        mlp_norm(hf, prefix, spec, dense=False),
        Row("mlp.router.weight", router, hidden, role="router"),
        *expert_mlps(
            experts,
            lambda expert, part: f"{prefix}.mlp.experts.{expert}.{part}_proj.weight",
            hidden=hidden,
            inner=field(hf, "moe_intermediate_size"),
            spec=spec,
        ),
    ]
