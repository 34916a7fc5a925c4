"""Build the rows of Megatron parameters that families share: norms, attention, gated MLPs, experts.

This module imports no engine. `layer` is the layer's prefix in the checkpoint, "model.layers.3".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from mrl.models.hf_config import HfConfig, field, head_dim
from mrl.models.layout import divide
from mrl.models.tensors import CheckpointRows, ParameterRows, Spec, Split, whole_tensor

PARTS = ("gate", "up", "down")
"""Projections of a gated MLP."""


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """All routed experts of one layer, as in the checkpoint."""

    count: int
    hidden: int
    inner: int
    name_of: Callable[[int, str], str]
    """Maps (expert, one of PARTS) to the checkpoint tensor."""


def norm(name: str, tensor: str, size: int) -> ParameterRows:
    """Return a norm's weight, which every rank has whole."""
    return ParameterRows(f"{name}.weight", whole_tensor(tensor, size), None)


def input_norm(hf: HfConfig, layer: str, *, folded: bool) -> ParameterRows:
    """Return the norm before attention, which may be folded into linear_qkv."""
    name = "self_attention.linear_qkv.layer_norm_weight" if folded else "input_layernorm.weight"
    return ParameterRows(
        name, whole_tensor(f"{layer}.input_layernorm.weight", field(hf, "hidden_size")), None
    )


def mlp_norm(hf: HfConfig, layer: str, *, folded: bool) -> ParameterRows:
    """Return the norm before the MLP, which may be folded into linear_fc1."""
    name = "mlp.linear_fc1.layer_norm_weight" if folded else "pre_mlp_layernorm.weight"
    return ParameterRows(
        name, whole_tensor(f"{layer}.post_attention_layernorm.weight", field(hf, "hidden_size")), None
    )


def grouped_query_attention(
    hf: HfConfig, layer: str, *, qk_norm: bool, qkv_bias: bool, gated: bool
) -> list[ParameterRows]:
    """Return QKV interleaved by query group ([q heads, k, v] per group), its biases, q and k norms, and
    output projection.

    `gated`: the checkpoint's q_proj has each head's query, then its output gate; a group then is [q heads,
    gates, k, v]. The whole interleaved tensor is split by rows. With tp above the number of groups Megatron
    splits groups and gathers activations, so no weights are replicated.
    """
    heads, groups, width = field(hf, "num_attention_heads"), field(hf, "num_key_value_heads"), head_dim(hf)
    share = divide(heads, groups, name="attention heads per query group")
    attention = f"{layer}.self_attn"

    def queries(group: int, tensor: str) -> list[CheckpointRows]:
        if not gated:
            return [CheckpointRows(tensor, group * share * width, share * width)]
        group_heads = range(group * share, (group + 1) * share)
        return [
            CheckpointRows(tensor, (2 * head + part) * width, width)
            for part in range(2)
            for head in group_heads
        ]

    def of_group(group: int, kind: str) -> list[CheckpointRows]:
        keys_and_values = [
            CheckpointRows(f"{attention}.{part}_proj.{kind}", group * width, width) for part in ("k", "v")
        ]
        return queries(group, f"{attention}.q_proj.{kind}") + keys_and_values

    def by_group(kind: str) -> tuple[tuple[CheckpointRows, ...]]:
        return (tuple(segment for group in range(groups) for segment in of_group(group, kind)),)

    hidden = field(hf, "hidden_size")
    rows = [ParameterRows("self_attention.linear_qkv.weight", by_group("weight"), hidden, "tp")]
    if qkv_bias:
        rows.append(ParameterRows("self_attention.linear_qkv.bias", by_group("bias"), None, "tp"))
    if qk_norm:
        rows.append(norm("self_attention.q_layernorm", f"{attention}.q_norm.weight", width))
        rows.append(norm("self_attention.k_layernorm", f"{attention}.k_norm.weight", width))
    o_proj = whole_tensor(f"{attention}.o_proj.weight", hidden)
    rows.append(ParameterRows("self_attention.linear_proj.weight", o_proj, heads * width, "tp", dim=1))
    return rows


def gated_mlp(
    name: str,
    tensor_of: Callable[[str], str],
    *,
    hidden: int,
    inner: int,
    split: Split = "tp",
    suffix: str = ".weight",
) -> list[ParameterRows]:
    """Return linear_fc1, a rank's gate rows then its up rows, and linear_fc2, split by columns.

    `tensor_of` maps one of PARTS to its checkpoint tensor.
    """
    gate, up, down = map(tensor_of, PARTS)
    fc1 = ((CheckpointRows(gate, 0, inner),), (CheckpointRows(up, 0, inner),))
    return [
        ParameterRows(f"{name}.linear_fc1{suffix}", fc1, hidden, split),
        ParameterRows(f"{name}.linear_fc2{suffix}", whole_tensor(down, hidden), inner, split, dim=1),
    ]


def expert_mlps(experts: Experts, numbers: Iterable[int], spec: Spec) -> list[ParameterRows]:
    """Return the experts of one rank (global `numbers`), which are numbered locally from 0."""
    hidden, inner, name_of = experts.hidden, experts.inner, experts.name_of
    if spec.experts == "stacked":
        first = [(CheckpointRows(name_of(e, part), 0, inner),) for e in numbers for part in ("gate", "up")]
        second = [(CheckpointRows(name_of(e, "down"), 0, hidden),) for e in numbers]
        return [
            ParameterRows("mlp.experts.weight1", tuple(first), hidden, "etp"),
            ParameterRows("mlp.experts.weight2", tuple(second), inner, "etp", dim=1),
        ]
    rows: list[ParameterRows] = []
    for local, expert in enumerate(numbers):
        grouped = spec.experts == "grouped"
        name = "mlp.experts" if grouped else f"mlp.experts.local_experts.{local}"
        suffix = f".weight{local}" if grouped else ".weight"

        def tensor_of(part: str, expert: int = expert) -> str:
            return name_of(expert, part)

        rows += gated_mlp(name, tensor_of, hidden=hidden, inner=inner, split="etp", suffix=suffix)
    return rows
