"""Name table of DeepSeek-V3: latent attention, dense first layers, shared experts, correction bias. Pure.

The checkpoint's multi-token-prediction layers are neither trained nor served: not listed (untrained()).
"""

from __future__ import annotations

from mrl.models.hf_config import HfConfig, field, require_no_attention_bias
from mrl.models.layer_rows import dense_mlp, expert_mlps, gated_mlp, input_norm, mlp_norm, norm
from mrl.models.tensors import Row, Spec, Split, whole


def is_moe_layer(hf: HfConfig, layer: int) -> bool:
    """Whether a layer has experts (`first_k_dense_replace`, `moe_layer_freq`)."""
    return layer >= hf.get("first_k_dense_replace", 0) and layer % hf.get("moe_layer_freq", 1) == 0


def untrained(hf: HfConfig) -> tuple[str, ...]:
    """Prefixes of the multi-token-prediction layers (`num_nextn_predict_layers`), which follow the model's own."""
    first = field(hf, "num_hidden_layers")
    return tuple(f"model.layers.{first + n}." for n in range(hf.get("num_nextn_predict_layers") or 0))


def layer(hf: HfConfig, number: int, spec: Spec, experts: range) -> list[Row]:
    """One layer with the experts of one rank."""
    prefix = f"model.layers.{number}"
    moe = is_moe_layer(hf, number)
    before = input_norm(hf, prefix, Spec())  # latent attention never folds its input norm
    after = mlp_norm(hf, prefix, spec, dense=not moe)
    mlp = _moe(hf, prefix, spec, experts) if moe else dense_mlp(hf, prefix)
    return [before, *_latent_attention(hf, prefix, spec), after, *mlp]


def _latent_attention(hf: HfConfig, prefix: str, spec: Spec) -> list[Row]:
    require_no_attention_bias(hf)
    hidden, heads = field(hf, "hidden_size"), field(hf, "num_attention_heads")
    nope, rope, value = field(hf, "qk_nope_head_dim"), field(hf, "qk_rope_head_dim"), field(hf, "v_head_dim")
    rank, attention = field(hf, "kv_lora_rank"), f"{prefix}.self_attn"
    down: Split = "none" if spec.whole_down_projections else "tp"

    def row(name: str, tensor: str, size: int, columns: int, split: Split = "tp", dim: int = 0) -> Row:
        weight = whole(f"{attention}.{tensor}.weight", size)
        return Row(f"self_attention.{name}.weight", weight, columns, split, dim)

    rows = []
    if q_rank := hf.get("q_lora_rank"):
        rows.append(row("linear_q_down_proj", "q_a_proj", q_rank, hidden, down))
        rows.append(
            _latent_norm("q_layernorm", "linear_q_up_proj", f"{attention}.q_a_layernorm.weight", q_rank, spec)
        )
        rows.append(row("linear_q_up_proj", "q_b_proj", heads * (nope + rope), q_rank))
    else:
        rows.append(row("linear_q_proj", "q_proj", heads * (nope + rope), hidden))
    rows.append(row("linear_kv_down_proj", "kv_a_proj_with_mqa", rank + rope, hidden, down))
    rows.append(
        _latent_norm("kv_layernorm", "linear_kv_up_proj", f"{attention}.kv_a_layernorm.weight", rank, spec)
    )
    rows.append(row("linear_kv_up_proj", "kv_b_proj", heads * (nope + value), rank))
    rows.append(row("linear_proj", "o_proj", hidden, heads * value, dim=1))
    return rows


def _latent_norm(name: str, next_linear: str, tensor: str, size: int, spec: Spec) -> Row:
    if spec.fold_norms:
        return Row(f"self_attention.{next_linear}.layer_norm_weight", whole(tensor, size), None)
    return norm(f"self_attention.{name}", tensor, size)


def _moe(hf: HfConfig, prefix: str, spec: Spec, experts: range) -> list[Row]:
    hidden, inner = field(hf, "hidden_size"), field(hf, "moe_intermediate_size")
    count = field(hf, "n_routed_experts", "num_local_experts")
    correction = whole(f"{prefix}.mlp.gate.e_score_correction_bias", count)
    rows = [
        Row("mlp.router.weight", whole(f"{prefix}.mlp.gate.weight", count), hidden, role="router"),
        Row("mlp.router.expert_bias", correction, None, role="correction"),
    ]
    rows += expert_mlps(
        experts,
        lambda expert, part: f"{prefix}.mlp.experts.{expert}.{part}_proj.weight",
        hidden=hidden,
        inner=inner,
        spec=spec,
    )
    if shared := hf.get("n_shared_experts"):
        names = {part: f"{prefix}.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
        rows += gated_mlp("mlp.shared_experts", hidden=hidden, inner=inner * shared, split="tp", **names)
    return rows
