"""The rank's experts in grouped products against one expert after the other."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from mrl.errors import ConfigError
from mrl.models.megatron.clamped_experts import ClampedExperts
from mrl.models.megatron.expert_layer import GroupedExperts
from mrl.models.megatron.model_config import ModelConfig

HIDDEN, INNER, EXPERTS = 16, 8, 4


def group(size: int = 1, rank: int = 0) -> types.SimpleNamespace:
    return types.SimpleNamespace(size=lambda: size, rank=lambda: rank)


def make(
    dtype: torch.dtype, *, inner: int = INNER, etp: int = 1, rank: int = 0, clamped: bool = False
) -> GroupedExperts:
    config = ModelConfig(
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
        clamped_swiglu=(1.702, 7.0) if clamped else None,
    )
    groups = types.SimpleNamespace(ep=group(), expt_tp=group(etp, rank), expt_dp=group())
    torch.manual_seed(0)
    return (ClampedExperts if clamped else GroupedExperts)(EXPERTS, config, pg_collection=groups)


def one_by_one(experts: GroupedExperts, hidden: Tensor, counts: list[int], probs: Tensor) -> Tensor:
    outputs, start = [], 0
    w1, w2 = (experts.weight1.view(EXPERTS, 2 * INNER, HIDDEN), experts.weight2.view(EXPERTS, HIDDEN, INNER))
    for expert, count in enumerate(counts):
        x, p = hidden[start : start + count], probs[start : start + count]
        gate, up = (x @ w1[expert].T).chunk(2, dim=-1)
        outputs.append((functional.silu(gate) * up * p[:, None]).to(x.dtype) @ w2[expert].T)
        start += count
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 7], [0, 0, 0, 0]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_outputs_and_gradients_are_those_of_single_experts(counts, dtype, tolerance) -> None:
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


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 0]])
def test_clamped_experts_are_those_of_transformers_one_after_the_other(counts: list[int]) -> None:
    """Compare values and gradients of weights and biases; inputs are large enough to meet both clamps."""
    experts = make(torch.float32, clamped=True)
    assert isinstance(experts, ClampedExperts)
    for bias in (experts.bias1, experts.bias2):
        torch.nn.init.normal_(bias)
    hidden, probs = 5 * torch.randn(sum(counts), HIDDEN), torch.rand(sum(counts))
    weights, parameters = torch.randn(sum(counts), HIDDEN), list(experts.parameters())

    def one_after_the_other() -> Tensor:
        outputs, clamps = [hidden.new_zeros(0, HIDDEN) * sum(p.sum() for p in parameters)], set()
        w1, w2 = (experts.weight1.view(EXPERTS, -1, HIDDEN), experts.weight2.view(EXPERTS, HIDDEN, INNER))
        biases = experts.bias1.view(EXPERTS, -1), experts.bias2.view(EXPERTS, HIDDEN)
        for expert, (x, p) in enumerate(zip(hidden.split(counts), probs.split(counts), strict=True)):
            inner = x @ w1[expert].T + biases[0][expert]
            gate, up = inner[:, ::2], inner[:, 1::2]
            clamps |= {clamp for clamp, met in (("gate", gate > 7), ("up", up.abs() > 7)) if met.any()}
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            out = (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ w2[expert].T + biases[1][expert]
            outputs.append(out * p[:, None])
        assert clamps == ({"gate", "up"} if any(counts) else set())
        return torch.cat(outputs)

    output, expected = experts(hidden, torch.tensor(counts), probs)[0], one_after_the_other()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), parameters) for out in (output, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_clamped_experts_are_stored_as_megatrons_with_their_biases() -> None:
    experts = make(torch.float32, clamped=True)
    stored = {name: shard.build() for name, shard in experts.sharded_state_dict("x.").items()}
    shapes = {name: (shard.key, shard.global_shape) for name, (shard,) in stored.items()}
    assert shapes == {
        "x.weight1": ("x.experts.linear_fc1.weight", (EXPERTS, 2 * INNER, HIDDEN)),
        "x.weight2": ("x.experts.linear_fc2.weight", (EXPERTS, HIDDEN, INNER)),
        "x.bias1": ("x.experts.linear_fc1.bias", (EXPERTS, 2 * INNER)),
        "x.bias2": ("x.experts.linear_fc2.bias", (EXPERTS, HIDDEN)),
    }
    for name, shard in experts.sharded_state_dict("x.").items():
        merged = shard.merge_fn([piece.data for piece in stored[name]])
        assert torch.equal(merged, experts.get_parameter(name.removeprefix("x.")))


def test_rows_that_grouped_products_cannot_take_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"expert width on a rank 6 in torch\.bfloat16 must span a multiple of 16 bytes"
    ):
        make(torch.bfloat16, inner=6)
