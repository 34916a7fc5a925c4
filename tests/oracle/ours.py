"""A rank's tensors by our name tables, in Megatron's names with Transformer Engine's layers."""

from __future__ import annotations

from typing import Any

import torch

from mrl.models.delta_net import DeltaNet, delta_net
from mrl.models.families import family_of
from mrl.models.layout import Layout, RankCoordinates
from mrl.models.tensors import TRANSFORMER_ENGINE, LocalTensor
from tests.oracle.rows import Held, held
from tests.oracle.tiny import numbered


def rank(config: dict[str, Any], layout: Layout, place: RankCoordinates) -> dict[str, torch.Tensor]:
    """Return Megatron's name -> values, of a folder from tiny.write_numbered(). Padding is 0."""
    family = family_of(config)
    folder = stored(config)
    tensors = family.local_tensors(config, layout, place, dtype="float32", spec=TRANSFORMER_ENGINE)
    return {tensor.name: filled(tensor, folder) for tensor in tensors}


def stored(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the numbered folder's tensors, with stacks as rows."""
    tensors = {t.name: t for t in family_of(config).checkpoint_tensors(config)}
    values, start = {}, 0
    for name in sorted(tensors):
        tensor = tensors[name]
        count = torch.Size(tensor.shape).numel()
        value = numbered(tensor.stored_shape, start)
        if tensor.stack:
            value = (value.transpose(1, 2) if len(tensor.shape) > 1 else value).flatten(0, 1)
        values[name], start = value.reshape(tensor.shape), start + count
    return values


def filled(tensor: LocalTensor, folder: dict[str, torch.Tensor]) -> torch.Tensor:
    result = torch.zeros(tensor.shape)
    for piece in tensor.pieces:
        source = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        target = tuple(slice(a, a + n) for a, n in zip(piece.local_start, piece.shape, strict=True))
        result[target] = folder[piece.tensor][source]
    return result


def table(config: dict[str, Any], layout: Layout, place: RankCoordinates) -> dict[str, Held]:
    """Return Megatron's name -> shape and digest, as the bridge's model of that rank has them."""
    values = rank(config, layout, place)
    if config["model_type"] == "gpt_oss":
        values = experts_apart(values, config["num_local_experts"] // layout.ep)
    if "linear_num_key_heads" in config:
        values = delta_nets_by_part(values, delta_net(config), layout.tp)
    return {name: held(value) for name, value in values.items()}


def experts_apart(values: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Split gpt-oss's `count` stacked experts: rows of gate, then of up, which we interleave as vLLM does."""
    result = {}
    for name, value in values.items():
        module, stacked, suffix = name.partition(".experts.")
        if not stacked:
            result[name] = value
            continue
        kind, number = suffix[:-1], suffix[-1]
        for expert, part in enumerate(value.chunk(count)):
            rows = torch.cat([part[0::2], part[1::2]]) if number == "1" else part
            result[f"{module}.experts.linear_fc{number}.{kind}{expert}"] = rows
    return result


def delta_nets_by_part(values: dict[str, torch.Tensor], net: DeltaNet, tp: int) -> dict[str, torch.Tensor]:
    """Return delta nets in Megatron's form: the input norm in the projection, rows by part, not by key head,
    and 1 less in the last norm's weight, since Megatron adds 1 to every norm's."""
    key, value, heads = net.key_width, net.share * net.value_width, net.key_heads // tp
    result = dict(values)
    for name in values:
        if name.endswith(".in_proj.weight"):
            norm = name.replace("self_attention.in_proj", "input_layernorm")
            result[name.replace("in_proj.", "in_proj.layer_norm_")] = result.pop(norm)
            result[name] = by_part(values[name], heads, (key, key, value, value, net.share, net.share))
        elif name.endswith(".conv_weight"):
            filters = by_part(result.pop(name), heads, (key, key, value))
            result[name.replace("conv_weight", "conv1d.weight")] = filters
        elif name.endswith(".out_norm.weight"):
            result[name] = values[name] - 1
    return result


def by_part(tensor: torch.Tensor, heads: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Reorder rows from head by head, with `sizes` rows of each part, to part by part."""
    split = [head.split(sizes) for head in tensor.chunk(heads)]
    return torch.cat([head[part] for part in range(len(sizes)) for head in split])
