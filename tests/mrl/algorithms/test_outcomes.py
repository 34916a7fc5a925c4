"""Reward shaping: the formulas."""

import pytest
import torch

from mrl.algorithms import outcomes
from mrl.config.sections.shaping import OverlongSection, ShapingSection
from tests.mrl.algorithms.padded import estimate


def test_overlong(golden) -> None:
    case = golden("F01")
    section = OverlongSection(max_tokens=100, buffer_tokens=20, factor=1.0)
    penalty = outcomes.overlong_penalty(section, case.tensor(case.inputs["lengths"]))
    case.check(penalty, case.expected["openrlhf (exceed capped at the buffer)"])


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


def test_missing_eos_and_clip() -> None:
    rewards = torch.tensor([1.0, 30.0, -5.0])
    finished, lengths = torch.tensor([True, False, False]), torch.tensor([1.0, 1.0, 1.0])
    section = ShapingSection(missing_eos_penalty=0.5)
    shaped = outcomes.shape(section, rewards, lengths, finished, torch.zeros(3, dtype=torch.bool))
    assert shaped.tolist() == [1, 29.5, -5.5]
    clipped, changed = outcomes.clip(rewards, (-2.0, 10.0))
    assert clipped.tolist() == [1, 10, -2]
    assert changed.tolist() == [False, True, True]


def test_clip_comes_before_group_shaping(golden) -> None:
    case = golden("C02")
    rewards, _ = outcomes.clip(case.tensor(case.inputs["rewards"]), (-10.0, 10.0))
    arguments = {
        "token_rewards": rewards[:, None],
        "loss_mask": torch.ones(4, 1),
        "group_ids": torch.zeros(4, dtype=torch.int64),
    }
    centred, _ = estimate("dr_grpo", **arguments)
    case.check(centred[:, 0], case.expected["clip then shape (mean-only)"])
    left_out, _ = estimate("rloo", **arguments)
    case.check(left_out[:, 0], case.expected["trl_rloo(reward_clip_range=(-10,10), clip first)"])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"clip": [2, 1]}, r"clip = \[2.0, 1.0\]: the first value must be below the second"),
        ({"stop_properly": 1.5}, "less than or equal to 1"),
    ],
)
def test_bad_constants_are_refused_by_the_section(section, message) -> None:
    with pytest.raises(ValueError, match=message):
        ShapingSection.model_validate(section)
