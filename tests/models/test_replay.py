"""Megatron's routing takes the experts it is given, with the weights that its scores have there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from mrl.errors import RoutingError
from mrl.models.megatron.replay import RecordedRouting, ReplayedRouting

EXPERTS, TOKENS, TOPK = 16, 50, 4
CASES: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {"score_function": "softmax"},
    "softmax of all": {"score_function": "softmax", "use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
}


def weights_of(logits: Tensor, experts: Tensor, case: dict[str, Any]) -> Tensor:
    """Return the weights [tokens, experts] that each kind of routing gives the experts."""
    if case["score_function"] == "sigmoid":
        scores = logits.sigmoid().gather(1, experts)
        weights = case.get("scaling_factor", 1.0) * scores / scores.sum(1, keepdim=True)
    elif case.get("use_pre_softmax"):
        weights = logits.softmax(1).gather(1, experts)
    else:
        weights = logits.gather(1, experts).softmax(1)
    return torch.zeros_like(logits).scatter(1, experts, weights)


def route(logits: Tensor, replay: Any, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    bias = torch.randn(EXPERTS) if case["score_function"] == "sigmoid" else None
    return topk_routing_with_score_function(logits, TOPK, expert_bias=bias, router_replay=replay, **case)


def random_experts() -> Tensor:
    return torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOPK].to(torch.uint8)


def known(number: int = TOKENS) -> Tensor:
    return torch.arange(TOKENS) < number


@pytest.mark.parametrize("name", CASES)
def test_given_experts_have_the_weights_of_todays_scores_and_their_gradient(name: str) -> None:
    torch.manual_seed(0)
    logits, experts = torch.randn(TOKENS, EXPERTS, requires_grad=True), random_experts()
    given = ReplayedRouting([experts], [known()])
    given.microbatch = 0
    weights, chosen = route(logits, given, CASES[name])
    expected = weights_of(logits, experts.long(), CASES[name])
    torch.testing.assert_close(weights, expected)
    assert (chosen == torch.zeros_like(chosen).scatter(1, experts.long(), True)).all()
    ours, theirs = (torch.autograd.grad(x.square().sum(), logits)[0] for x in (weights, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_choice_that_is_given_back_is_the_routers_own(name: str) -> None:
    torch.manual_seed(0)
    logits, record = torch.randn(TOKENS, EXPERTS), RecordedRouting()
    record.microbatch = 0
    plain = route(logits, record, CASES[name])
    given = ReplayedRouting([record.experts[0]], [known()])
    given.microbatch = 0
    for ours, theirs in zip(route(logits, given, CASES[name]), plain, strict=True):
        assert torch.equal(ours, theirs)
    assert given.agreement.tolist() == [TOKENS * TOPK, TOKENS * TOPK]


def test_agreement_counts_known_tokens_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS)
    chosen = logits.topk(TOPK).indices
    half = torch.where(torch.arange(TOKENS)[:, None] % 2 == 0, chosen, (chosen + 1) % EXPERTS)
    given = ReplayedRouting([half.to(torch.uint8)], [known(10)])
    given.microbatch = 0
    route(logits, given, CASES["softmax of the chosen"])
    shared = (half[:10, :, None] == chosen[:10, None]).any(2).sum()
    assert given.agreement.tolist() == [int(shared), 10 * TOPK]


def test_layers_that_are_computed_again_take_the_same_experts_in_order() -> None:
    torch.manual_seed(0)
    logits, experts = torch.randn(TOKENS, EXPERTS), [random_experts() for _ in range(3)]
    given, case = ReplayedRouting(experts, [known()] * 3), CASES["softmax of the chosen"]

    def visited(microbatch: int | None) -> Tensor:
        given.microbatch = microbatch
        return route(logits, given, case)[1]

    forward = [visited(0), visited(1)]  # one forward, one backward, as a pipeline does it
    again = [visited(None)]
    forward.append(visited(2))
    with pytest.raises(RoutingError, match=r"layer 7: of 3 micro-batches, .* recomputed: 1"):
        given.require_all_taken("layer 7")
    again += [visited(None), visited(None)]
    given.require_all_taken("layer 7")
    assert all(torch.equal(*pair) for pair in zip(forward, again, strict=True))
    with pytest.raises(RoutingError, match="is recomputed before"):
        visited(None)


def test_a_pass_that_left_a_microbatch_out_is_named() -> None:
    given = ReplayedRouting([random_experts()] * 2, [known()] * 2)
    given.microbatch = 1
    route(torch.randn(TOKENS, EXPERTS), given, CASES["sigmoid"])
    with pytest.raises(
        RoutingError, match=r"layer 3: of 2 micro-batches, these used their given experts: \[1\]"
    ):
        given.require_all_taken("layer 3")
