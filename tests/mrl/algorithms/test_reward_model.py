"""The loss of reward models against TRL's own trainer; microbatches do not matter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.algorithms.reward_model_objective import RewardModelObjective, pair_losses, score_metrics
from mrl.algorithms.tokens import Segments
from mrl.config.sections.tune import ObjectiveSection


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


CHOSEN, REJECTED, MARGIN = numbers(2.0, -1.0, 0.5), numbers(1.0, 1.0, 0.5), numbers(0.5, 1.0, 0.0)
SURE = numbers(1.0, 1.0, 1.0)
LENGTHS = np.array([4, 6, 3, 9, 5, 5])


def section(**settings: Any) -> ObjectiveSection:
    return ObjectiveSection(name="reward_model", **settings)


@pytest.mark.parametrize(
    ("settings", "margin", "expected"),
    [
        ({}, 0 * MARGIN, 1.0444456263737136),
        ({}, MARGIN, 1.4052705054379313),
        ({"center": {"weight": 0.01}}, 0 * MARGIN, 1.077778959707047),
    ],
)
def test_the_loss_is_that_of_trls_trainer(settings: dict[str, Any], margin: Tensor, expected: float) -> None:
    """Loss, margin, centring term and metrics of the three pairs come from the trainer (TRL f2cd577)."""
    scores = torch.stack([CHOSEN, REJECTED], 1).reshape(-1)
    loss, metrics = one_token_each(settings, scores, margin=margin.repeat_interleave(2))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics["preference/margin_mean"].item() == pytest.approx(-1 / 3)
    assert metrics["preference/accuracy"].item() == pytest.approx(0.5)  # TRL's 1/3: it counts ties as losses


def one_token_each(
    settings: dict[str, Any], scores: Tensor, **known: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics of one-token responses; `scores` [2P], chosen and rejected in turn."""
    side = np.tile([1.0, 0.0], len(scores) // 2)
    values = {"side": side, "margin": 0 * side, "probability": np.ones_like(side)}
    values |= {name: value.numpy() for name, value in known.items()}
    return RewardModelObjective(section(**settings))(
        values=scores,
        arrays={"loss_mask": torch.ones(len(scores), dtype=torch.bool)},
        segments=Segments.of(np.ones(len(scores), int), values=values),
        denominators={"num_rows": len(side) / 2, "score_sum": float(scores.detach().sum())},
    )


@pytest.mark.parametrize("probability", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_and_smoothing_end_overconfidence(probability: float, smoothing: float) -> None:
    """The gradient is 0 at the log-odds of the label's probability; certain labels have no such point."""
    believed = (1 - smoothing) * probability + smoothing * (1 - probability)
    if believed == 1.0:
        return
    best = numbers(math.log(believed / (1 - believed))).requires_grad_()
    loss = pair_losses(section(smoothing=smoothing), best, numbers(0.0), numbers(0.0), numbers(probability))
    assert torch.autograd.grad(loss.sum(), best)[0].item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["batch_sum", "batch_mean"])
def test_the_square_of_a_sum_has_its_own_gradient(kind: str) -> None:
    scores = torch.stack([CHOSEN, REJECTED], 1).reshape(-1).requires_grad_()
    settings = {"center": {"kind": kind, "weight": 0.3}}
    plain, _ = one_token_each({}, scores)
    loss, metrics = one_token_each(settings, scores)
    square = scores.sum() ** 2 if kind == "batch_sum" else scores.mean() ** 2
    assert loss.item() == pytest.approx((plain + 0.3 * square).item(), abs=1e-12)
    assert metrics["preference/center"].item() == pytest.approx(0.3 * square.item())
    (ours,) = torch.autograd.grad(loss, scores)
    (whole,) = torch.autograd.grad(one_token_each({}, scores)[0] + 0.3 * square, scores)
    torch.testing.assert_close(ours, whole, rtol=0, atol=1e-10)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"smoothing": 0.1, "center": {"weight": 0.02}},
    {"center": {"kind": "batch_sum", "weight": 0.01}},
    {"center": {"kind": "batch_mean", "weight": 0.5}},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_shares_of_single_pairs_add_up_to_the_whole(settings: dict[str, Any]) -> None:
    """Loss, gradient and metrics of a microbatch are the sums over its single pairs."""
    objective, generator = RewardModelObjective(section(**settings)), np.random.default_rng(0)
    values = torch.from_numpy(generator.normal(size=LENGTHS.sum()))
    mask = torch.from_numpy(np.concatenate([np.arange(n) == n - 1 for n in LENGTHS]))
    known = {
        "side": np.array([1.0, 0] * 3),
        "margin": np.repeat([0.0, 0.3, 1.0], 2),
        "probability": np.repeat([1.0, 0.7, 0.2], 2),
    }
    score_sum = float(values[mask].sum())

    def share(samples: np.ndarray) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        selected = torch.from_numpy(np.isin(np.repeat(np.arange(6), LENGTHS), samples))
        part = values[selected].clone().requires_grad_()
        loss, metrics = objective(
            values=part,
            arrays={"loss_mask": mask[selected]},
            segments=Segments.of(LENGTHS[samples], values={n: v[samples] for n, v in known.items()}),
            denominators={"num_rows": 3.5, "score_sum": score_sum},
        )
        return loss.detach(), metrics, torch.autograd.grad(loss, part)[0]

    whole = share(np.arange(6))
    parts = [share(np.array([2 * p, 2 * p + 1])) for p in range(3)]
    assert whole[0].item() == pytest.approx(sum(p[0].item() for p in parts), abs=1e-12)
    torch.testing.assert_close(whole[2], torch.cat([p[2] for p in parts]), rtol=0, atol=1e-12)
    assert (whole[2][~mask] == 0).all() and (whole[2][mask] != 0).all()
    for name, value in whole[1].items():
        assert value.item() == pytest.approx(sum(p[1][name].item() for p in parts), abs=1e-12)


def test_accuracy_is_what_the_labels_say_of_the_higher_score() -> None:
    probability = numbers(1.0, 0.2, 0.9)
    metrics = score_metrics(CHOSEN, REJECTED, probability, 1 / 3)
    assert metrics["preference/accuracy"].item() == pytest.approx((1.0 + 0.8 + 0.5) / 3)
