"""gpt-oss (arXiv 2508.10925): attention sinks, a window in every other layer, biases everywhere, experts with
a clamped activation, stored as transposed stacks.

Source of the forms: transformers 5.19, models/gpt_oss; of vLLM's names: vllm 0.32,
model_executor/models/gpt_oss.py. Trainer and engine store experts alike, gate and up rows interleaved, so a
weight sync moves rows. Only a folder has each expert transposed (`CheckpointTensor.stack`) or, as published,
in mxfp4 (models/mxfp4.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mrl.errors import ConfigError
from mrl.models.engine_rows import EngineRows, Shard
from mrl.models.family import Family
from mrl.models.hf_config import MXFP4, HfConfig, field
from mrl.models.layout import Layout, RankCoordinates
from mrl.models.tensors import CheckpointRows, LocalTensor, ParameterRows, Spec, TensorSlice, whole_tensor

WINDOWED, FULL = "sliding_attention", "full_attention"
ALPHA, LIMIT = 1.702, 7.0
"""Constants of the activation; vLLM reads neither from config.json."""


class GptOss(Family):
    """gpt-oss."""

    model_type = "gpt_oss"
    expert_count_keys = ("num_local_experts", "num_experts")
    expert_width_key = "intermediate_size"
    fewest_experts_per_token = 2
    implemented = {
        "attention_bias": (True,),
        "tie_word_embeddings": (None, False),
        "swiglu_alpha": (None, ALPHA),
        "swiglu_limit": (None, LIMIT),
    }
    harmless = ("experts_per_token", "initial_context_length")
    layer_kinds = (WINDOWED, FULL)
    rope_kinds = ("yarn",)
    quantised = (MXFP4,)
    needs_own_attention = True

    def qkv_bias(self, hf: HfConfig) -> bool:
        return True

    def unsupported(self, hf: HfConfig) -> list[str]:
        problems = super().unsupported(hf)
        kinds = layer_types(hf)
        if kinds != [FULL if number % 2 else WINDOWED for number in range(len(kinds))]:
            problems.append("layer_types (supported: alternating sliding_attention, full_attention)")
        return problems

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        return super().transformer_fields(hf) | {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "window_size": (field(hf, "sliding_window") - 1, 0),
            "window_attn_skip_freq": [int(kind == WINDOWED) for kind in layer_types(hf)],
            "clamped_swiglu": (ALPHA, LIMIT),
        }

    # Where tensors are

    def attention_rows(self, hf: HfConfig, layer: str, spec: Spec) -> list[ParameterRows]:
        attention, heads = f"{layer}.self_attn", field(hf, "num_attention_heads")
        bias = whole_tensor(f"{attention}.o_proj.bias", field(hf, "hidden_size"))
        sinks = whole_tensor(f"{attention}.sinks", heads)
        return [
            *super().attention_rows(hf, layer, spec),
            ParameterRows("self_attention.linear_proj.bias", bias, None),
            ParameterRows("self_attention.core_attention.softmax_offset", sinks, None, "tp"),
        ]

    def moe_rows(self, hf: HfConfig, layer: str, spec: Spec, numbers: range) -> list[ParameterRows]:
        """Return the rows of the router with its biases and of one rank's experts, stacked or separate."""
        router, count = f"{layer}.mlp.router", self.num_experts(hf)
        result = [
            ParameterRows(
                "mlp.router.weight", whole_tensor(f"{router}.weight", count), field(hf, "hidden_size")
            ),
            ParameterRows("mlp.router.bias", whole_tensor(f"{router}.bias", count), None),
        ]
        if spec.experts != "sequential":
            return result + _expert_rows(hf, layer, numbers, count, "mlp.experts.{kind}{number}")
        for local, expert in enumerate(numbers):
            names = f"mlp.experts.local_experts.{local}.linear_fc{{number}}.{{kind}}"
            result += _expert_rows(hf, layer, (expert,), count, names)
        return result

    def local_tensors(
        self, hf: HfConfig, layout: Layout, place: RankCoordinates, **options: Any
    ) -> list[LocalTensor]:
        """Raise ConfigError if experts would be split, because their second biases belong to one rank."""
        if layout.etp > 1:
            raise ConfigError(
                f"training.layout.etp = {layout.etp} would split the experts of gpt_oss, which have biases; "
                "set etp = 1 and raise ep"
            )
        return super().local_tensors(hf, layout, place, **options)

    # Tensors of a vLLM engine

    def engine_tensors(self, hf: HfConfig, shard: Shard, *, dtype: str = "bfloat16") -> list[LocalTensor]:
        """Return the tensors under vLLM's names.

        Raises ConfigError if experts would be split: vLLM gives their second biases to only one rank.
        """
        if shard.tp > 1 and shard.ep == 1:
            raise ConfigError(
                f"rollout.tp = {shard.tp} would split the experts of gpt_oss, which must be whole; set "
                "rollout.expert_parallel = true"
            )
        tensors = super().engine_tensors(hf, shard, dtype=dtype)
        return [dataclasses.replace(tensor, name=_engine_name(tensor.name)) for tensor in tensors]

    def engine_attention(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        attention, heads = f"{layer}.self_attn", engine.heads(hf)
        yield from super().engine_attention(hf, layer, engine)
        yield engine.whole(f"{attention}.o_proj.bias", field(hf, "hidden_size"))
        yield engine.stacked(f"{attention}.sinks", [(f"{attention}.sinks", heads, heads)])

    def engine_moe(self, hf: HfConfig, layer: str, engine: EngineRows) -> Iterator[LocalTensor]:
        router, count = f"{layer}.mlp.router", self.num_experts(hf)
        local_experts = engine.shard.experts(count)
        yield engine.whole(f"{router}.weight", count, field(hf, "hidden_size"))
        yield engine.whole(f"{router}.bias", count)
        for product, (part, size, *columns) in zip(("w13", "w2"), _products(hf), strict=True):
            for kind, width in (("weight", columns), ("bias", [])):
                tensor, zero = _stored(layer, part, kind), [0] * len(width)
                pieces = tuple(
                    TensorSlice(tensor, (expert * size, *zero), (size, *width), (local, 0, *zero))
                    for local, expert in enumerate(local_experts)
                )
                name = f"{layer}.mlp.experts.routed_experts.{product}_{kind}"
                yield LocalTensor(name, 0, (len(local_experts), size, *width), engine.dtype, pieces)


def layer_types(hf: HfConfig) -> list[str]:
    """Return the kind of each layer's attention; alternating if config.json does not set it."""
    numbers = range(field(hf, "num_hidden_layers"))
    return list(hf.get("layer_types") or [FULL if number % 2 else WINDOWED for number in numbers])


def _products(hf: HfConfig) -> list[tuple[str, int, int]]:
    """Return (part of the checkpoint's name, rows, columns) of an expert's two matrices."""
    hidden, inner = field(hf, "hidden_size"), field(hf, "intermediate_size")
    return [("gate_up", 2 * inner, hidden), ("down", hidden, inner)]


def _stored(layer: str, part: str, kind: str) -> str:
    """Return the checkpoint tensor of all experts' weights or biases."""
    return f"{layer}.mlp.experts.{part}_proj" + ("_bias" if kind == "bias" else "")


def _expert_rows(hf: HfConfig, layer: str, numbers: Any, count: int, names: str) -> list[ParameterRows]:
    """Return weights and biases of experts (global `numbers`) as four parameters named by kind and number."""
    result = []
    for number, (part, size, columns) in enumerate(_products(hf), start=1):
        for kind in ("weight", "bias"):
            tensor = _stored(layer, part, kind)
            blocks = tuple((CheckpointRows(tensor, expert * size, size),) for expert in numbers)
            name = names.format(kind=kind, number=number)
            result.append(ParameterRows(name, blocks, columns if kind == "weight" else None, stack=count))
    return result


def _engine_name(tensor: str) -> str:
    """Return vLLM's name of a parameter; others are named as their checkpoint tensor."""
    return tensor.replace(".self_attn.", ".attn.").replace("embed_tokens", "embedding")
