"""Sigmoid routing without groups on CPU: the chosen experts, also for float8 experts."""

import pytest
import torch
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from mrl.cpu.vllm_router import allow_sigmoid_without_groups

pytestmark = pytest.mark.integration

BIAS = torch.linspace(-0.5, 0.5, 16)


@pytest.fixture
def router() -> CPURouter:
    allow_sigmoid_without_groups()
    return CPURouter(top_k=4, global_num_experts=16, scoring_func="sigmoid", e_score_correction_bias=BIAS)


def test_experts_are_chosen_by_score_and_bias_and_weighed_by_score(router: CPURouter) -> None:
    logits = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    weights, chosen = router._compute_routing(torch.empty(32, 1), logits, None)
    scores = logits.sigmoid()
    best = (scores + BIAS).topk(4).indices
    assert chosen.long().sort(-1).values.equal(best.sort(-1).values)
    picked = scores.gather(1, chosen.long())
    torch.testing.assert_close(weights, picked / picked.sum(-1, keepdim=True))


def test_float8_experts_take_that_choice(router: CPURouter) -> None:
    assert router.routing_method_type is RoutingMethodType.MiniMax2
    assert CPUExpertsFp8._supports_routing_method(router.routing_method_type, None, None)
    assert not CPUExpertsFp8._supports_routing_method(RoutingMethodType.Unspecified, None, None)
