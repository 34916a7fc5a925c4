"""The packed gated delta rule and its convolution against transformers' torch forms, segment by segment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError
from mrl.models.delta_net import CHUNK
from mrl.models.families import require_trainable
from mrl.models.kernels.buckets import positions
from mrl.models.kernels.delta_rule import (
    chunk_segments,
    gated_delta_rule,
    gated_delta_step,
    short_convolution,
)
from mrl.models.layout import Layout
from mrl.resharding.planner import trainer_manifests
from mrl.rollout import quantised

LENGTHS = np.array([1, 63, 200, 64, 3, 130])
"""Shorter than a chunk, of just one, and of several; not in the order of their sizes."""
CPU = torch.device("cpu")


def inputs(dtype: torch.dtype = torch.float32, *, lengths: np.ndarray = LENGTHS) -> dict[str, Tensor]:
    """Return inputs of 2 key heads of width 12 and 4 value heads of width 20."""
    torch.manual_seed(0)
    tokens = int(lengths.sum())
    shapes = {"query": (2, 12), "key": (2, 12), "value": (4, 20), "decay": (4,), "beta": (4,)}
    tensors = {name: torch.randn(tokens, *shape, dtype=dtype) for name, shape in shapes.items()}
    tensors["decay"] = -torch.nn.functional.softplus(tensors["decay"])
    tensors["beta"] = tensors["beta"].sigmoid()
    return {name: x.requires_grad_() for name, x in tensors.items()}


def rule(x: dict[str, Tensor], lengths: np.ndarray, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
    chunks = chunk_segments(lengths, device=CPU)
    return gated_delta_rule(x["query"], x["key"], x["value"], x["decay"], x["beta"], chunks, states)


def by_transformers(x: dict[str, Tensor], lengths: np.ndarray = LENGTHS) -> Tensor:
    outputs = []
    for part in zip(*(value.split(lengths.tolist()) for value in x.values()), strict=True):
        query, key, value, decay, beta = (piece[None] for piece in part)
        query, key = (heads.repeat_interleave(2, dim=2) for heads in (query, key))
        out, _ = reference.torch_chunk_gated_delta_rule(
            query, key, value, decay, beta, use_qk_l2norm_in_kernel=True
        )
        outputs.append(out[0])
    return torch.cat(outputs)


def test_outputs_and_gradients_are_those_of_transformers() -> None:
    x = inputs()
    out, _ = rule(x, LENGTHS)
    expected = by_transformers(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    weights = torch.randn_like(out)
    gradients, wanted = (torch.autograd.grad((y * weights).sum(), list(x.values())) for y in (out, expected))
    for name, ours, theirs in zip(x, gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=name)


def test_a_segment_goes_on_from_its_state() -> None:
    x = inputs(torch.float64, lengths=np.array([150, 90]))
    whole, ends = rule(x, np.array([150, 90]))

    def part(low: int, high: int) -> dict[str, Tensor]:
        spans = [slice(low, high), slice(150 + low, 150 + high)]
        return {name: torch.cat([value[span] for span in spans]) for name, value in x.items()}

    one, state = rule(part(0, 70), np.array([70, 70]))
    two, state = rule(part(70, 89), np.array([19, 19]), state)
    end = part(89, 90)
    three, state = gated_delta_step(end["query"], end["key"], end["value"], end["decay"], end["beta"], state)
    torch.testing.assert_close(torch.cat([one[70:], two[19:], three[1:]]), whole[150:], rtol=0, atol=1e-12)
    torch.testing.assert_close(state[1], ends[1], rtol=0, atol=1e-12)


def test_what_fills_the_slots_of_padding_is_never_seen() -> None:
    """Padding repeats token 0; if it were not silenced, an overflow there would spread."""
    x = {name: value.detach() for name, value in inputs(lengths=np.array([1, 5])).items()}
    x["key"][0], x["value"][0] = 1e30, 1e30
    out, states = rule(x, np.array([1, 5]))
    x["key"][0], x["value"][0] = 1.0, 1.0
    calm, calm_states = rule(x, np.array([1, 5]))
    assert torch.equal(out[1:], calm[1:]) and torch.equal(states[1], calm_states[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_does_not_cross_segments(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = np.array([1, 7, 2, 30])
    x, weight = torch.randn(40, 6, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    output = short_convolution(x, weight, torch.from_numpy(positions(lengths)))
    parts = x.split(lengths.tolist())
    expected = [reference.causal_conv1d_fn(part.T[None], weight, activation="silu")[0].T for part in parts]
    close: dict[str, Any] = (
        {"rtol": 0, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    torch.testing.assert_close(output, torch.cat(expected), **close)


def test_rounds_are_of_falling_size_and_hold_every_token_once() -> None:
    chunks = chunk_segments(LENGTHS, device=CPU)
    assert chunks.rounds == (6, 2, 2, 1) and chunks.order.tolist() == [2, 5, 0, 1, 3, 4]
    assert torch.equal(chunks.slot_tokens[chunks.token_slots], torch.arange(int(LENGTHS.sum())))
    assert int(chunks.filled.sum()) == LENGTHS.sum() and len(chunks.filled) == 11 * CHUNK


NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "rope_theta": 1e4, "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (Layout(tp=2, cp=2), "key heads of delta nets over tp x cp"),
        (Layout(tp=4), "key heads of delta nets over tp x cp"),
    ],
)
def test_layouts_that_delta_nets_are_not_implemented_in_are_refused_by_name(layout, named) -> None:
    with pytest.raises(ConfigError, match=named):
        trainer_manifests.trainer_rank_manifests(NEXT, layout)


def test_delta_nets_that_a_weight_sync_would_quantise_are_refused_by_name() -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    require_trainable(NEXT | {"quantization_config": settings})
    with pytest.raises(ConfigError, match="delta nets are served wide only"):
        quantised.require_whole_blocks(NEXT, RolloutSection(quantization="fp8_block"))
