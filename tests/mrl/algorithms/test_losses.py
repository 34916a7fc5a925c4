"""Losses as called: reduction to one number, splits, weights, metrics, refusals; the value loss."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.algorithms.tokens import Segments, checked
from mrl.config.sections.algorithm import AggregationSection, AlgorithmSection
from tests.mrl.algorithms.padded import NAMES, aggregate, policy_loss, value_loss

MODES = ("token_mean", "sequence_mean", "constant")


def test_golden_denominators(golden) -> None:
    case = golden("D13")
    loss, mask = case.tensor(case.inputs["token_loss"]), case.tensor(case.inputs["mask"])
    case.check(aggregate(loss, mask, "token_mean"), case.expected["global token mean (target)"])
    case.check(aggregate(loss, mask, "sequence_mean"), case.expected["global sequence mean"])
    parts = [
        aggregate(loss[rows], mask[rows], "token_mean", num_tokens=12)
        for rows in case.params["micro_batches"]
    ]
    case.check(torch.stack(parts).sum(), case.expected["global token mean (target)"])
    alone = [aggregate(loss[rows], mask[rows], "token_mean") for rows in case.params["micro_batches"]]
    case.check(torch.stack(alone), case.expected["two optimizer steps: own-step token mean"])


def test_constant_divides_by_sequences_times_length() -> None:
    loss = torch.tensor([[1.0, 2.0, 50.0], [3.0, 50.0, 50.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert float(aggregate(loss, mask, "constant", constant=4)) == pytest.approx(6 / (2 * 4))


def test_an_aggregation_is_checked_by_its_section() -> None:
    with pytest.raises(
        ValueError, match=r"did you mean 'token_mean'\? known: token_mean, sequence_mean, constant"
    ):
        AggregationSection.model_validate({"mode": "tokens_mean"})
    with pytest.raises(ValueError, match="length = None with mode = constant: set a length with constant"):
        AggregationSection(mode="constant")
    with pytest.raises(ValueError, match=r"length = 3 with mode = token_mean.* none with the other modes"):
        AggregationSection(mode="token_mean", length=3)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        AggregationSection(mode="constant", length=-1)


def call(name: str, part, logprobs: Tensor, **options) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(
        name,
        logprobs=logprobs,
        old_logprobs=part.arrays["old_logprobs"],
        advantages=part.arrays["advantages"],
        loss_mask=part.mask,
        segment_ids=part.segment_ids,
        **options,
    )


def test_metrics_of_a_worked_case() -> None:
    ratio = torch.tensor([[2.0, 0.5, 1.0, 9.0]], dtype=torch.float64)
    _, metrics = policy_loss(
        "ppo_clip",
        logprobs=ratio.log(),
        old_logprobs=torch.zeros(1, 4, dtype=torch.float64),
        advantages=torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float64),
        loss_mask=torch.tensor([[1, 1, 1, 0]]),
    )
    assert float(metrics["policy/clip_frac_high"]) == pytest.approx(1 / 3)
    assert float(metrics["policy/clip_frac_low"]) == pytest.approx(1 / 3)
    assert float(metrics["policy/ratio_max"]) == pytest.approx(2.0)
    assert float(metrics["policy/ratio_mean"]) == pytest.approx(3.5 / 3)
    assert float(metrics["policy/kl_old"]) == pytest.approx(
        (1 - 0.6931471805599453 - 0.5 + 0.6931471805599453) / 3
    )


def test_sequences_without_tokens_are_counted(batch) -> None:
    _, metrics = call("gspo", batch, batch.arrays["logprobs"])
    assert float(metrics["policy/empty_sequences"]) == 1.0


class TestBadInput:
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3),
    }

    @pytest.mark.parametrize("argument", ["logprobs", "old_logprobs", "advantages"])
    def test_shape_and_dtype(self, argument) -> None:
        with pytest.raises(ValueError, match=rf"^{argument}: shape \(8,\)"):
            policy_loss("ppo_clip", **(self.arguments | {argument: torch.zeros(2, 4)}))
        with pytest.raises(TypeError, match=rf"^{argument}: dtype torch.bfloat16"):
            policy_loss("ppo_clip", **(self.arguments | {argument: torch.zeros(2, 3).bfloat16()}))

    @pytest.mark.parametrize(
        ("section", "message"),
        [
            ({"name": "ppo"}, r"unknown loss 'ppo': .*known: ppo_clip, gspo"),
            ({"name": "ppo_clip", "tau": 1.0}, r"ppo_clip.tau\n.*Extra inputs are not permitted"),
            ({"name": "ppo_clip", "dual_clip": 0.5}, "greater than 1"),
        ],
    )
    def test_names_and_constants_are_checked_by_the_section(self, section, message) -> None:
        with pytest.raises(ValueError, match=message):
            AlgorithmSection.model_validate({"loss": section})

    def test_a_mask_is_bool(self) -> None:
        ones = torch.ones(3)
        with pytest.raises(TypeError, match=r"loss_mask: dtype torch.float32, expected bool"):
            checked({"logprobs": ones}, ones, Segments.of(np.array([2, 1])))

    def test_an_extreme_ratio_stays_finite(self) -> None:
        variable = torch.full((2, 3), -1.0).requires_grad_()
        extreme = self.arguments | {"old_logprobs": torch.full((2, 3), -500.0), "logprobs": variable}
        for name in NAMES:
            variable.grad = None
            loss, _ = policy_loss(name, **(extreme | {"advantages": torch.full((2, 3), -1.0)}))
            loss.backward()
            assert bool(torch.isfinite(loss)), name
            assert bool(torch.isfinite(variable.grad).all()), name


@pytest.mark.parametrize(
    ("variant", "clip", "aggregation"),
    [
        ("openrlhf/trl token-mean clip 0.5", 0.5, "token_mean"),
        ("trl token-mean clip 0.2", 0.2, "token_mean"),
        ("roll seq-mean no clip (default)", None, "sequence_mean"),
        ("roll seq-mean clip 0.5", 0.5, "sequence_mean"),
    ],
)
def test_value_loss(golden, variant, clip, aggregation) -> None:
    case = golden("D15")
    loss, metrics = value_loss(
        values=case.tensor(case.inputs["values"]),
        old_values=case.tensor(case.inputs["old"]),
        returns=case.tensor(case.inputs["returns"]),
        loss_mask=case.tensor(case.inputs["mask"]),
        clip=clip,
        aggregation=aggregation,
    )
    case.check(loss, case.expected[variant])
    if clip == 0.2:
        expected = case.expected["clip fraction at 0.2 (clipped term larger)"]
        assert float(metrics["critic/clip_frac"]) == pytest.approx(expected)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_value_gradient_against_finite_differences(clip, aggregation, batch) -> None:
    def loss(values: Tensor) -> Tensor:
        return value_loss(
            values=values,
            old_values=batch.arrays["values"],
            returns=batch.arrays["returns"],
            loss_mask=batch.mask,
            clip=clip,
            aggregation=aggregation,
        )[0]

    start = batch.arrays["values"] + batch.arrays["advantages"] / 4
    variable = start.clone().requires_grad_()
    loss(variable).backward()
    for row, column in [(0, 0), (2, 1), (5, 3), (6, 2), (8, 0), (10, 4), (3, 1)]:
        bump = torch.zeros_like(start)
        bump[row, column] = 1e-6
        slope = (loss(start + bump) - loss(start - bump)) / 2e-6
        assert float(variable.grad[row, column]) == pytest.approx(float(slope), abs=1e-8)


def test_value_loss_refuses() -> None:
    arguments = {name: torch.zeros(2, 3) for name in ("values", "old_values", "returns")}
    arguments["loss_mask"] = torch.ones(2, 3)
    with pytest.raises(ValueError, match="greater than 0"):
        AlgorithmSection(value_clip=0.0)
    with pytest.raises(ValueError, match="returns: inf in sample 0"):
        value_loss(
            clip=0.2, aggregation="token_mean", **(arguments | {"returns": torch.full((2, 3), float("inf"))})
        )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mask_without_tokens_gives_zero_and_is_counted(name, aggregation) -> None:
    variable = torch.full((2, 3), float("nan"), dtype=torch.float64).requires_grad_()
    loss, metrics = policy_loss(
        name,
        logprobs=variable,
        old_logprobs=torch.zeros(2, 3, dtype=torch.float64),
        advantages=torch.ones(2, 3, dtype=torch.float64),
        loss_mask=torch.zeros(2, 3),
        aggregation=aggregation,
        constant=4 if aggregation == "constant" else None,
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(variable.grad, torch.zeros(2, 3, dtype=torch.float64))
    assert float(metrics["policy/empty_sequences"]) == 2.0
    assert all(bool(torch.isfinite(value)) for value in metrics.values())
