"""Reward shaping: formulas, normalisation, running statistics."""

import dataclasses

import pytest
import torch

from mrl.algorithms import outcomes
from mrl.algorithms.outcomes import RunningMoments
from mrl.config.sections.shaping import NormaliseSection, OverlongSection, ShapingSection
from tests.mrl.algorithms.padded import estimate


@pytest.mark.parametrize(
    ("variant", "capped"), [("openrlhf (exceed capped at the buffer)", True), ("verl (not capped)", False)]
)
def test_overlong(golden, variant, capped) -> None:
    case = golden("F01")
    section = OverlongSection(max_tokens=100, buffer_tokens=20, factor=1.0, capped=capped)
    penalty = outcomes.overlong_penalty(section, case.tensor(case.inputs["lengths"]))
    case.check(penalty, case.expected[variant])


def test_overlong_refuses_an_empty_buffer() -> None:
    with pytest.raises(ValueError, match=r"buffer_tokens\n.*greater than or equal to 1"):
        OverlongSection(max_tokens=10, buffer_tokens=0)


@pytest.mark.parametrize(
    ("coefficient", "expected"),
    [(0.5, [0.5, 1.0, -1.0, -1.0]), (0.0, [0.0, 1.0, -1.0, -1.0]), (-0.25, [-0.25, 1.0, -0.25, -1.0])],
)
def test_stop_properly(coefficient, expected) -> None:
    rewards = torch.tensor([1.0, 1.0, -1.0, -1.0])
    truncated = torch.tensor([True, False, True, False])
    assert outcomes.stop_properly(rewards, truncated, coefficient=coefficient).tolist() == expected


def test_missing_eos_clip_and_length() -> None:
    rewards = torch.tensor([1.0, 30.0, -5.0])
    finished, lengths = torch.tensor([True, False, False]), torch.tensor([1.0, 1.0, 1.0])
    section = ShapingSection(missing_eos_penalty=0.5)
    shaped = outcomes.shape(section, rewards, lengths, finished, torch.zeros(3, dtype=torch.bool))
    assert shaped.tolist() == [1, 29.5, -5.5]
    clipped, changed = outcomes.clip(rewards, low=-2.0, high=10.0)
    assert clipped.tolist() == [1, 10, -2]
    assert changed.tolist() == [False, True, True]
    assert outcomes.per_length(rewards, torch.tensor([10, 20, 0]), reference=10.0).tolist() == [1, 15, -5]


def test_clip_comes_before_group_shaping(golden) -> None:
    case = golden("C02")
    rewards, _ = outcomes.clip(case.tensor(case.inputs["rewards"]), low=-10.0, high=10.0)
    arguments = {
        "token_rewards": rewards[:, None],
        "loss_mask": torch.ones(4, 1),
        "group_ids": torch.zeros(4, dtype=torch.int64),
    }
    centred, _ = estimate("dr_grpo", **arguments)
    case.check(centred[:, 0], case.expected["clip then shape (mean-only)"])
    left_out, _ = estimate("rloo", **arguments)
    case.check(left_out[:, 0], case.expected["trl_rloo(reward_clip_range=(-10,10), clip first)"])


REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1], dtype=torch.float64)
GROUPS = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2])


def normalise(rewards: torch.Tensor, groups: torch.Tensor = GROUPS, **constants) -> torch.Tensor:
    running = RunningMoments().merged(rewards)
    return outcomes.normalise(NormaliseSection(**constants), rewards, groups, running)


def test_normalise_over_each_set() -> None:
    moments = RunningMoments().merged(REWARDS)
    assert moments.mean == pytest.approx(0.375)
    assert moments.std() == pytest.approx(0.51754917)
    batch = normalise(REWARDS, mean="batch", std="batch", eps=0.0)
    running = normalise(REWARDS, mean="running", std="running", eps=0.0)
    torch.testing.assert_close(batch, (REWARDS - 0.375) / 0.517549169506766)
    torch.testing.assert_close(running, batch)
    group = normalise(REWARDS, mean="group", std="group", eps=0.0)
    assert group.tolist() == pytest.approx(
        [0.8660254, -0.8660254, -0.8660254, 0.8660254, -0.5, -0.5, -0.5, 1.5]
    )
    mixed = normalise(REWARDS, mean="batch", std="group", eps=0.0)
    assert mixed.shape == (8,)
    assert float(mixed[0]) == pytest.approx((1 - 0.375) / 0.5773502691896257)


def test_normalise_leaves_out_a_division_by_nothing() -> None:
    same = torch.full((4,), 0.9, dtype=torch.float64)
    centred = normalise(same, mean="batch", std="batch").tolist()
    assert centred == pytest.approx([0.0] * 4, abs=1e-7)
    assert normalise(same, torch.zeros(4), std="group").tolist() == same.tolist()


def test_running_moments_merge_as_one() -> None:
    values = torch.tensor([1.0, 5.0, -3.0, 2.0, 2.5, 9.0], dtype=torch.float64)
    pieces = RunningMoments().merged(values[:1]).merged(values[1:4]).merged(values[4:]).merged(values[:0])
    assert pieces.mean == pytest.approx(float(values.mean()), abs=1e-12)
    assert pieces.std() == pytest.approx(float(values.std()), abs=1e-12)
    assert RunningMoments(**dataclasses.asdict(pieces)) == pieces
    assert RunningMoments().merged(values[:1]).std() == 0.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"normalise": {"mean": "groups"}}, "'none', 'batch', 'group' or 'running'"),
        ({"clip_low": 2, "clip_high": 1}, r"clip_low = 2.0 must be below clip_high = 1.0"),
        ({"stop_properly": 1.5}, "less than or equal to 1"),
        ({"length_reference": 0}, "greater than 0"),
    ],
)
def test_bad_constants_are_refused_by_the_section(section, message) -> None:
    with pytest.raises(ValueError, match=message):
        ShapingSection.model_validate(section)
