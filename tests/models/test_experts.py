"""The rank's experts in grouped products against one expert after the other."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as functional
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.errors import ConfigError
from mrl.models.megatron.experts import GroupedExperts

HIDDEN, INNER, EXPERTS = 16, 8, 4


def group(size: int = 1, rank: int = 0) -> types.SimpleNamespace:
    return types.SimpleNamespace(size=lambda: size, rank=lambda: rank)


def make(dtype: torch.dtype, *, inner: int = INNER, etp: int = 1, rank: int = 0) -> GroupedExperts:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=inner,
        params_dtype=dtype,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        add_bias_linear=False,
        init_method_std=0.3,
    )
    groups = types.SimpleNamespace(ep=group(), expt_tp=group(etp, rank), expt_dp=group())
    torch.manual_seed(0)
    return GroupedExperts(EXPERTS, config, pg_collection=groups)


def one_by_one(experts: GroupedExperts, hidden: Tensor, counts: list[int], probs: Tensor) -> Tensor:
    outputs, start = [], 0
    first, second = (
        experts.weight1.view(EXPERTS, 2 * INNER, HIDDEN),
        experts.weight2.view(EXPERTS, HIDDEN, INNER),
    )
    for expert, count in enumerate(counts):
        x, p = hidden[start : start + count], probs[start : start + count]
        gate, up = (x @ first[expert].T).chunk(2, dim=-1)
        outputs.append((functional.silu(gate) * up * p[:, None]).to(x.dtype) @ second[expert].T)
        start += count
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 7], [0, 0, 0, 0]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_outputs_and_gradients_are_those_of_single_experts(
    counts: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    experts = make(dtype)
    hidden = torch.randn(sum(counts), HIDDEN, dtype=dtype)
    probs, weights = torch.rand(sum(counts)), torch.randn(sum(counts), HIDDEN, dtype=dtype)
    results = []
    for call in (
        lambda x, p: experts(x, torch.tensor(counts), p)[0],
        lambda x, p: one_by_one(experts, x, counts, p),
    ):
        x, p = hidden.clone().requires_grad_(), probs.clone().requires_grad_()
        output = call(x, p)
        (output * weights).sum().backward()
        results.append([output, x.grad, p.grad, experts.weight1.grad, experts.weight2.grad])
        experts.zero_grad()
    for ours, expected in zip(*results, strict=True):
        assert ours is not None and ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    if any(counts):
        assert results[0][0].abs().sum() > 0 and results[0][3].abs().sum() > 0


def test_a_rank_of_expert_tensor_parallel_two_holds_half_of_every_expert() -> None:
    experts = make(torch.float32, etp=2, rank=1)
    assert experts.weight1.shape == (EXPERTS * INNER, HIDDEN)
    assert experts.weight2.shape == (EXPERTS * HIDDEN, INNER // 2)
    gate, up = experts.sharded_state_dict("x.")["x.weight1"].build()
    assert gate.key == up.key == "x.experts.linear_fc1.weight"
    assert gate.global_shape == (EXPERTS, 2 * INNER, HIDDEN)
    assert (gate.global_offset, up.global_offset) == ((0, INNER // 2, 0), (0, INNER + INNER // 2, 0))
    assert torch.equal(gate.data, experts.weight1.view(EXPERTS, 2, INNER // 2, HIDDEN)[:, 0])
    (down,) = experts.sharded_state_dict("x.")["x.weight2"].build()
    assert (down.global_shape, down.global_offset) == ((EXPERTS, HIDDEN, INNER), (0, 0, INNER // 2))
    factory = experts.sharded_state_dict("x.")["x.weight1"]
    assert torch.equal(factory.merge_fn([gate.data, up.data]), experts.weight1)


def test_rows_that_grouped_products_cannot_take_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"expert width on a rank 6 in torch\.bfloat16: .* multiple of 16 bytes"
    ):
        make(torch.bfloat16, inner=6)
