"""The loss of reward models against the values of TRL's own trainer, and that no microbatch matters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from mrl.algorithms.reward_model import (
    RewardModelObjective,
    deviation_of_difference,
    log_preference,
    pair_losses,
    score_metrics,
)
from mrl.algorithms.tokens import Segments
from mrl.config.sections.tune import CenterSection, ObjectiveSection


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


CHOSEN, REJECTED, MARGIN = numbers(2.0, -1.0, 0.5), numbers(1.0, 1.0, 0.5), numbers(0.5, 1.0, 0.0)
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
    """The three pairs are those whose loss, margin, centring term and metrics the trainer told (TRL f2cd577)."""
    scores = torch.stack([CHOSEN, REJECTED], 1).reshape(-1)
    loss, metrics = one_token_each(settings, scores, margin=margin.repeat_interleave(2))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics["preference/margin_mean"].item() == pytest.approx(-1 / 3)
    assert metrics["preference/accuracy"].item() == pytest.approx(0.5)  # TRL's 1/3: its ties are wrong


def one_token_each(
    settings: dict[str, Any], scores: Tensor, **known: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of responses of one token; `scores` [2P], chosen and rejected in turn."""
    side = np.tile([1.0, 0.0], len(scores) // 2)
    values = {
        "side": side,
        "weight": np.ones_like(side),
        "margin": 0 * side,
        "probability": np.ones_like(side),
    }
    values |= {name: value.numpy() for name, value in known.items()}
    return RewardModelObjective(section(**settings))(
        values=scores,
        arrays={"loss_mask": torch.ones(len(scores), dtype=torch.bool)},
        segments=Segments.of(np.ones(len(scores), int), values=values),
        denominators={"num_rows": len(side) / 2, "score_sum": [float(scores.detach().sum())]},
    )


@pytest.mark.parametrize("probability", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_and_smoothing_end_overconfidence(probability: float, smoothing: float) -> None:
    """The gradient is 0 where the difference is the log-odds of what the label says; certain labels have no such place."""
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
    """Loss, gradient and metrics of one microbatch are the sums of those of one pair each; weights say what a pair counts."""
    objective, generator = RewardModelObjective(section(**settings)), np.random.default_rng(0)
    values = torch.from_numpy(generator.normal(size=LENGTHS.sum()))
    mask = torch.from_numpy(np.concatenate([np.arange(n) == n - 1 for n in LENGTHS]))
    weight = np.repeat([1.0, 0.5, 2.0], 2)
    known = {
        "side": np.array([1.0, 0] * 3),
        "weight": weight,
        "margin": np.repeat([0.0, 0.3, 1.0], 2),
        "probability": np.repeat([1.0, 0.7, 0.2], 2),
    }
    score_sum = float((values[mask].numpy() * weight).sum())

    def share(samples: np.ndarray) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        own = torch.from_numpy(np.isin(np.repeat(np.arange(6), LENGTHS), samples))
        part = values[own].clone().requires_grad_()
        loss, metrics = objective(
            values=part,
            arrays={"loss_mask": mask[own]},
            segments=Segments.of(LENGTHS[samples], values={n: v[samples] for n, v in known.items()}),
            denominators={"num_rows": 3.5, "score_sum": [score_sum]},
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
    metrics = score_metrics(CHOSEN, REJECTED, probability, numbers(0.25, 0.25, 0.5))
    assert metrics["preference/accuracy"].item() == pytest.approx(0.25 * 1.0 + 0.25 * 0.8 + 0.5 * 0.5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "reward_model", "beta": 0.3}, "not read by reward_model"),
        ({"name": "dpo", "center": CenterSection(weight=0.1)}, "not read by dpo"),
        ({"name": "sft", "smoothing": 0.1}, "not read by sft"),
        ({"name": "dpo", "heads": 3}, "heads: not read by dpo"),
    ],
)
def test_a_setting_that_has_no_effect_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ObjectiveSection(**settings)


HEADS = 3


@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_heads_are_trained_each_by_its_own_draw_of_the_pairs(settings: dict[str, Any]) -> None:
    """Loss and gradient are the mean of those of single heads that see each pair as often as it was drawn; autograd of a formula written
    down here, with the square of a step's sum as a square."""
    generator, pairs = np.random.default_rng(1), 5
    scores = torch.from_numpy(generator.normal(size=(2 * pairs, HEADS))).requires_grad_()
    counts = generator.poisson(1.0, (pairs, HEADS)).astype(np.float64)
    counts[2] = 0  # no head drew it
    weight, margin, probability = generator.random((3, pairs))
    known = {"weight": weight, "margin": margin, "probability": probability, "bootstrap": counts}
    known = {name: np.repeat(values, 2, axis=0) for name, values in known.items()}
    whole = (scores.detach().numpy() * known["weight"][:, None]).sum(0)
    loss, metrics = RewardModelObjective(section(heads=HEADS, **settings))(
        values=scores,
        arrays={"loss_mask": torch.ones(2 * pairs, dtype=torch.bool)},
        segments=Segments.of(np.ones(2 * pairs, int), values=known | {"side": np.tile([1.0, 0.0], pairs)}),
        denominators={"num_rows": weight.sum(), "score_sum": whole.tolist()},
    )
    (ours,) = torch.autograd.grad(loss, scores)

    read = section(**settings)
    believed = torch.from_numpy((1 - read.smoothing) * probability + read.smoothing * (1 - probability))
    expected = torch.zeros((), dtype=torch.float64)
    for head in range(HEADS):
        up, down = scores[0::2, head], scores[1::2, head]
        odds = up - down - torch.from_numpy(margin)
        costs = -believed * torch.sigmoid(odds).log() - (1 - believed) * torch.sigmoid(-odds).log()
        expected = (
            expected + (costs * torch.from_numpy(weight * counts[:, head])).sum() / weight.sum() / HEADS
        )
        assert read.center is not None
        total = (up + down) * torch.from_numpy(weight)
        square = {
            "pair": lambda up=up, down=down: (
                ((up + down) ** 2 * torch.from_numpy(weight)).sum() / weight.sum()
            ),
            "batch_sum": lambda total=total: total.sum() ** 2,
            "batch_mean": lambda total=total: (total.sum() / (2 * weight.sum())) ** 2,
        }[read.center.kind]()
        expected = expected + read.center.weight * square / HEADS
    (wanted,) = torch.autograd.grad(expected, scores)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    spread = scores.detach().numpy().std(axis=1)
    assert metrics["preference/disagreement"].item() == pytest.approx(
        (spread * known["weight"]).sum() / 2 / weight.sum()
    )


def test_accuracy_is_that_of_the_heads_mean() -> None:
    """One head is wrong by 1, two are right by 3: the mean is right."""
    values = {name: np.ones(2) for name in ("weight", "probability")} | {"margin": np.zeros(2)}
    values |= {"side": np.array([1.0, 0.0]), "bootstrap": np.zeros((2, HEADS))}
    _, metrics = RewardModelObjective(section(heads=HEADS, center={"weight": 0.1}))(
        values=torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, 0.0]], dtype=torch.float64),
        arrays={"loss_mask": torch.ones(2, dtype=torch.bool)},
        segments=Segments.of(np.ones(2, int), values=values),
        denominators={"num_rows": 1.0},
    )
    assert metrics["preference/accuracy"].item() == 1.0 and metrics["preference/pair_loss"].item() == 0.0
    assert metrics["preference/margin_mean"].item() == pytest.approx(5 / 3)


def test_several_heads_need_a_common_height() -> None:
    with pytest.raises(ValidationError, match="center: to be set for several heads"):
        section(heads=3)
    assert section(heads=3, center={"weight": 0.1}).heads == 3 and section().heads == 1


@pytest.mark.parametrize(
    ("difference", "sigmas", "expected"),
    [(1.0, (0.5, 0.5), 0.711573167845), (1.0, (2.0, 2.0), 0.618188579798), (0.0, (1.0, 3.0), 0.5)],
)
def test_the_probability_of_distributions_is_the_papers(difference, sigmas, expected) -> None:
    """Values of a trapezoid rule over the normal density, which a sum over many more points than the quadrature's gives again."""
    deviation = deviation_of_difference(numbers(*sigmas).log())
    found = log_preference(numbers(difference), deviation).exp()
    assert found.item() == pytest.approx(expected, abs=1e-6)
    z = np.linspace(-12, 12, 200_001)
    drawn = 1 / (1 + np.exp(-(difference + math.hypot(*sigmas) * z)))
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    assert found.item() == pytest.approx(np.trapezoid(drawn * density, z), abs=1e-6)
    assert log_preference(numbers(-800.0), deviation).item() == pytest.approx(-800.0, rel=0.02), "no infinity"


OF_DISTRIBUTIONS: list[dict[str, Any]] = [
    {"distribution": {"prior": 0.3}},
    {"distribution": {"prior": 0.0}, "smoothing": 0.1, "center": {"kind": "batch_sum", "weight": 0.01}},
]  # fmt: skip


@pytest.mark.parametrize("settings", OF_DISTRIBUTIONS)
def test_a_distribution_has_the_gradient_of_its_formula(settings: dict[str, Any]) -> None:
    """Over all pairs at once and in microbatches of one pair; autograd of an integral written down here."""
    generator, pairs = np.random.default_rng(2), 4
    values = torch.from_numpy(generator.normal(size=(2 * pairs, 2)))
    weight, margin, probability = generator.random((3, pairs))
    known = {"weight": weight, "margin": margin, "probability": probability}
    known = {name: np.repeat(each, 2) for name, each in known.items()}
    score_sum = (values.numpy() * known["weight"][:, None]).sum(0).tolist()

    def share(rows: np.ndarray) -> tuple[float, Tensor, dict[str, Tensor]]:
        part = values[torch.from_numpy(rows)].clone().requires_grad_()
        loss, metrics = RewardModelObjective(section(**settings))(
            values=part,
            arrays={"loss_mask": torch.ones(len(rows), dtype=torch.bool)},
            segments=Segments.of(np.ones(len(rows), int), values={n: v[rows] for n, v in known.items()}),
            denominators={"num_rows": weight.sum(), "score_sum": score_sum},
        )
        return loss.item(), torch.autograd.grad(loss, part)[0], metrics

    read, outputs = section(**settings), values.clone().requires_grad_()
    mean, sigma = outputs[:, 0], outputs[:, 1].exp()
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    odds = mean[0::2] - mean[1::2] - torch.from_numpy(margin)
    spread = (sigma[0::2] ** 2 + sigma[1::2] ** 2).sqrt()
    wins = (torch.sigmoid(odds[:, None] + spread[:, None] * z) * density).sum(1)
    believed = torch.from_numpy((1 - read.smoothing) * probability + read.smoothing * (1 - probability))
    costs = -believed * wins.log() - (1 - believed) * (1 - wins).log()
    assert read.distribution is not None
    costs = costs + read.distribution.prior * (outputs[:, 1] ** 2).reshape(-1, 2).mean(1)
    expected = (costs * torch.from_numpy(weight)).sum() / weight.sum()
    if read.center is not None:
        expected = expected + read.center.weight * (mean * torch.from_numpy(known["weight"])).sum() ** 2
    (wanted,) = torch.autograd.grad(expected, outputs)

    loss, gradient, metrics = share(np.arange(2 * pairs))
    parts = [share(np.array([2 * p, 2 * p + 1])) for p in range(pairs)]
    assert loss == pytest.approx(expected.item(), abs=5e-6)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), gradient, rtol=0, atol=1e-12)
    assert sum(p[0] for p in parts) == pytest.approx(loss, abs=1e-12)
    mean_sigma = (sigma.detach().numpy() * known["weight"]).sum() / 2 / weight.sum()
    assert metrics["preference/sigma"].item() == pytest.approx(mean_sigma)
    assert metrics["preference/sigma"].item() == pytest.approx(
        sum(p[2]["preference/sigma"].item() for p in parts)
    )


def test_labels_that_contradict_each_other_want_a_larger_deviation() -> None:
    """Two pairs of one mean difference, the first labelled alike each time, of the second's labels two in five reversed. With the means
    held, the deviation of least cost gives each pair the share of its labels, so the second's is the larger for every difference."""
    agreeing, contradicting = (least_cost_deviation(difference=4.0, share=share) for share in (1.0, 0.6))
    assert contradicting > 10 * agreeing > 0
    both = deviation_of_difference(numbers(contradicting, contradicting).log())
    assert log_preference(numbers(4.0), both).exp().item() == pytest.approx(0.6, abs=0.03), (
        "but for the prior"
    )


def least_cost_deviation(*, difference: float, share: float) -> float:
    """Return the deviation of each response at which the objective's derivative is 0, by bisection, for a pair whose labels prefer the
    response of the higher mean in `share` of the cases."""
    mean = numbers(difference, 0.0)
    objective = RewardModelObjective(section(distribution={"prior": 1e-3}))
    known = {"weight": np.ones(2), "margin": np.zeros(2), "probability": np.full(2, share)}

    def slope(log_sigma: float) -> float:
        logs = torch.full((2,), log_sigma, dtype=torch.float64, requires_grad=True)
        loss, _ = objective(
            values=torch.stack([mean, logs], 1),
            arrays={"loss_mask": torch.ones(2, dtype=torch.bool)},
            segments=Segments.of(np.ones(2, int), values=known),
            denominators={"num_rows": 1.0},
        )
        return torch.autograd.grad(loss, logs)[0].sum().item()

    low, high = math.log(1e-3), math.log(1e3)
    assert slope(low) < 0 < slope(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return math.exp(low)


def test_a_distribution_is_of_one_head() -> None:
    with pytest.raises(ValidationError, match="distribution: of one head"):
        section(heads=3, center={"weight": 0.1}, distribution={})
    assert section(distribution={}).labels == ("mean", "log_sigma")
