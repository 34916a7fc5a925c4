"""The recorded margin is the largest change of what routing compares that cannot change the choice."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from mrl.models.megatron.layer_modules import RecordingRouter

EXPERTS, TOKENS = 16, 200
CASES: dict[str, dict[str, Any]] = {
    "softmax": {"score_function": "softmax", "topk": 4},
    "sigmoid": {"score_function": "sigmoid", "topk": 4},
    "sigmoid-groups": {"score_function": "sigmoid", "topk": 4, "num_groups": 4, "group_topk": 2},
    "all-experts": {"score_function": "softmax", "topk": EXPERTS},
}


def margins_of(logits: torch.Tensor, bias: torch.Tensor | None, case: dict[str, Any]) -> torch.Tensor:
    config = types.SimpleNamespace(
        moe_router_num_groups=case.get("num_groups"), moe_router_group_topk=case.get("group_topk")
    )
    router: Any = types.SimpleNamespace(
        score_function=case["score_function"], topk=case["topk"], expert_bias=bias, config=config
    )
    return RecordingRouter._smallest_gap(router, logits)


@pytest.mark.parametrize("name", CASES)
def test_a_change_below_the_margin_changes_no_choice_and_one_above_can(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float64)
    sigmoid = case["score_function"] == "sigmoid"
    bias = 0.2 * torch.randn(EXPERTS) if sigmoid else None
    margins = margins_of(logits, bias, case)
    assert (margins > 0).all()
    if name == "all-experts":
        assert margins.isinf().all()
        return

    def differs(step: torch.Tensor) -> torch.Tensor:
        """Return [tokens] if the choice changes when everything compared moves up or down by `step`."""
        moved = compared + step[:, None] * (torch.randint(0, 2, compared.shape) * 2 - 1)
        return (chosen(moved) != chosen(compared)).any(1)

    def chosen(compared: torch.Tensor) -> torch.Tensor:
        logits = compared.clamp(1e-6, 1 - 1e-6).logit() if sigmoid else compared
        return topk_routing_with_score_function(logits, expert_bias=bias, **case)[1]

    compared = logits.sigmoid() if sigmoid else logits
    # Two experts move apart by twice the step, the sums of two groups by four times.
    quarter = margins.double() / 4
    assert not any(differs(0.999 * quarter).any() for _ in range(50))
    assert torch.stack([differs(4 * quarter) for _ in range(50)]).any(0).double().mean() > 0.5
