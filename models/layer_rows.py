"""Rows that several families share: norms, grouped-query attention, gated MLPs, experts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mrl.models.hf_config import HfConfig, field, head_dim, require_no_attention_bias
from mrl.models.layout import divide
from mrl.models.tensors import Row, Segment, Spec, Split, whole


def norm(name: str, tensor: str, size: int) -> Row:
    """A replicated norm weight."""
    return Row(f"{name}.weight", whole(tensor, size), None)


def input_norm(hf: HfConfig, layer: str, spec: Spec) -> Row:
    """The norm before attention, folded into linear_qkv where the spec folds."""
    name = "self_attention.linear_qkv.layer_norm_weight" if spec.fold_norms else "input_layernorm.weight"
    return Row(name, whole(f"{layer}.input_layernorm.weight", field(hf, "hidden_size")), None)


def mlp_norm(hf: HfConfig, layer: str, spec: Spec, *, dense: bool) -> Row:
    """The norm before the MLP; only a dense MLP's is folded."""
    name = "mlp.linear_fc1.layer_norm_weight" if dense and spec.fold_norms else "pre_mlp_layernorm.weight"
    return Row(name, whole(f"{layer}.post_attention_layernorm.weight", field(hf, "hidden_size")), None)


def grouped_query_attention(hf: HfConfig, layer: str, *, qk_norm: bool) -> list[Row]:
    """QKV interleaved by query group ([q heads of the group, k, v] per group), norms of q and k, output projection.

    The whole interleaved tensor is cut by rows. With tp above the number of groups Megatron cuts through a group and
    gathers activations, so nothing is replicated in storage.
    """
    require_no_attention_bias(hf)
    heads, groups, width = field(hf, "num_attention_heads"), field(hf, "num_key_value_heads"), head_dim(hf)
    q_rows = divide(heads, groups, what="attention heads per query group") * width
    attention = f"{layer}.self_attn"
    block: list[Segment] = []
    for group in range(groups):
        block.append(Segment(f"{attention}.q_proj.weight", group * q_rows, q_rows))
        block.append(Segment(f"{attention}.k_proj.weight", group * width, width))
        block.append(Segment(f"{attention}.v_proj.weight", group * width, width))
    hidden = field(hf, "hidden_size")
    rows = [Row("self_attention.linear_qkv.weight", (tuple(block),), hidden, "tp")]
    if qk_norm:
        rows.append(norm("self_attention.q_layernorm", f"{attention}.q_norm.weight", width))
        rows.append(norm("self_attention.k_layernorm", f"{attention}.k_norm.weight", width))
    o_proj = whole(f"{attention}.o_proj.weight", hidden)
    rows.append(Row("self_attention.linear_proj.weight", o_proj, heads * width, "tp", dim=1))
    return rows


def gated_mlp(
    name: str,
    *,
    gate: str,
    up: str,
    down: str,
    hidden: int,
    inner: int,
    split: Split,
    suffix: str = ".weight",
) -> list[Row]:
    """linear_fc1 holds a rank's gate rows, then its up rows; linear_fc2 is cut by columns."""
    fc1 = ((Segment(gate, 0, inner),), (Segment(up, 0, inner),))
    return [
        Row(f"{name}.linear_fc1{suffix}", fc1, hidden, split),
        Row(f"{name}.linear_fc2{suffix}", whole(down, hidden), inner, split, dim=1),
    ]


def dense_mlp(hf: HfConfig, layer: str) -> list[Row]:
    """The MLP of a dense layer."""
    names = {part: f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    return gated_mlp(
        "mlp", hidden=field(hf, "hidden_size"), inner=field(hf, "intermediate_size"), split="tp", **names
    )


def expert_mlps(
    experts: Iterable[int], name_of: Callable[[int, str], str], *, hidden: int, inner: int, spec: Spec
) -> list[Row]:
    """The experts one rank holds, numbered from 0 locally; name_of(expert, "gate" | "up" | "down") is the checkpoint name."""
    own = [{part: name_of(expert, part) for part in ("gate", "up", "down")} for expert in experts]
    if spec.experts == "stacked":
        first = [(Segment(names[part], 0, inner),) for names in own for part in ("gate", "up")]
        second = [(Segment(names["down"], 0, hidden),) for names in own]
        return [
            Row("mlp.experts.weight1", tuple(first), hidden, "etp"),
            Row("mlp.experts.weight2", tuple(second), inner, "etp", dim=1),
        ]
    rows: list[Row] = []
    for local, names in enumerate(own):
        grouped = spec.experts == "grouped"
        name = "mlp.experts" if grouped else f"mlp.experts.local_experts.{local}"
        suffix = f".weight{local}" if grouped else ".weight"
        rows.extend(gated_mlp(name, hidden=hidden, inner=inner, split="etp", suffix=suffix, **names))
    return rows
