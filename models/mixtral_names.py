"""Name table of Mixtral. Pure."""

from __future__ import annotations

from mrl.models.hf_config import HfConfig, field
from mrl.models.layer_rows import expert_mlps, grouped_query_attention, input_norm, mlp_norm
from mrl.models.tensors import Row, Spec, whole

PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def layer(hf: HfConfig, number: int, spec: Spec, experts: range) -> list[Row]:
    """One layer with the experts of one rank; every layer has experts, q and k have no norm."""
    prefix = f"model.layers.{number}"
    moe = f"{prefix}.block_sparse_moe"
    hidden = field(hf, "hidden_size")
    return [
        input_norm(hf, prefix, spec),
        *grouped_query_attention(hf, prefix, qk_norm=False),
        mlp_norm(hf, prefix, spec, dense=False),
        Row(
            "mlp.router.weight",
            whole(f"{moe}.gate.weight", field(hf, "num_local_experts")),
            hidden,
            role="router",
        ),
        *expert_mlps(
            experts,
            lambda expert, part: f"{moe}.experts.{expert}.{PARTS[part]}.weight",
            hidden=hidden,
            inner=field(hf, "intermediate_size"),
            spec=spec,
        ),
    ]
