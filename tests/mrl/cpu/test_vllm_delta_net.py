"""A float32 engine computes delta nets alike for whole, split and interleaved requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.forward_context import override_forward_context
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from mrl.cpu.vllm_delta_net import delta_net_core
from mrl.models.kernels.buckets import positions
from mrl.models.kernels.delta_rule import chunk_segments, gated_delta_rule, gates, short_convolution

pytestmark = pytest.mark.integration

KEYS, VALUES, KEY, VALUE, WIDTH = 2, 4, 8, 12, 4
CHANNELS = 2 * KEYS * KEY + VALUES * VALUE
LENGTHS = {"a": 101, "b": 32, "c": 9}
STEPS = [[("a", 70), ("b", 31)], [("b", 1), ("a", 30), ("c", 8)], [("c", 1), ("a", 1)]]
"""Requests and their tokens in each step of the engine; those of one token come first."""


def split(mixed: torch.Tensor) -> list[torch.Tensor]:
    parts = mixed.split([KEYS * KEY, KEYS * KEY, VALUES * VALUE], dim=-1)
    return [p.unflatten(1, (-1, width)) for p, width in zip(parts, (KEY, KEY, VALUE), strict=True)]


@pytest.fixture
def layer() -> Any:
    """A layer's parameters, and caches of four slots filled with leftovers of earlier requests."""
    torch.manual_seed(0)
    return SimpleNamespace(
        prefix="layer",
        A_log=torch.randn(VALUES),
        dt_bias=torch.randn(VALUES),
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH)),
        kv_cache=(torch.randn(4, WIDTH - 1, CHANNELS), torch.randn(4, VALUES, VALUE, KEY)),
        rearrange_mixed_qkv=lambda mixed: [x.unsqueeze(0) for x in split(mixed)],
    )


def test_parts_and_turns_change_nothing(layer: Any) -> None:
    tokens = {name: torch.randn(size, CHANNELS + 2 * VALUES) for name, size in LENGTHS.items()}
    slots, done = {"a": 3, "b": 1, "c": 2}, dict.fromkeys(LENGTHS, 0)
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in LENGTHS}
    for step in STEPS:
        taken = [tokens[name][done[name] : done[name] + size] for name, size in step]
        mixed, b, a = torch.cat(taken).split([CHANNELS, VALUES, VALUES], dim=-1)
        sizes = [size for _, size in step]
        decodes = sum(done[name] > 0 and size == 1 for name, size in step)
        metadata = GDNAttentionMetadata(
            num_prefills=len(step) - decodes,
            num_prefill_tokens=sum(sizes) - decodes,
            num_decodes=decodes,
            num_decode_tokens=decodes,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=sum(sizes),
            has_initial_state=torch.tensor([done[name] > 0 for name, _ in step])
            if decodes < len(step)
            else None,
            non_spec_query_start_loc=torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
            non_spec_state_indices_tensor=torch.tensor([slots[name] for name, _ in step], dtype=torch.int32),
        )
        context: Any = SimpleNamespace(no_compile_layers={"layer": layer}, attn_metadata={"layer": metadata})
        out = torch.zeros(sum(sizes), VALUES, VALUE)
        with override_forward_context(context):
            delta_net_core(mixed, b, a, out, "layer")
        for (name, size), part in zip(step, out.split(sizes), strict=True):
            outputs[name].append(part)
            done[name] += size
    assert done == LENGTHS
    for name, size in LENGTHS.items():
        mixed, b, a = tokens[name].split([CHANNELS, VALUES, VALUES], dim=-1)
        lengths = np.array([size])
        mixed = short_convolution(mixed, layer.conv1d.weight[:, 0], torch.from_numpy(positions(lengths)))
        decay, beta = gates(a, b, layer.A_log, layer.dt_bias)
        query, key, value = split(mixed)
        chunks = chunk_segments(lengths, device=torch.device("cpu"))
        expected, _ = gated_delta_rule(query, key, value, decay, beta, chunks)
        torch.testing.assert_close(torch.cat(outputs[name]), expected, rtol=0, atol=1e-5)
