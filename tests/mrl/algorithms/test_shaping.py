"""Reward shaping formulas."""

import pytest
import torch

from mrl.algorithms import shaping
from mrl.algorithms.advantages import estimate
from mrl.algorithms.running import RunningMoments


@pytest.mark.parametrize(
    ("variant", "capped"), [("openrlhf (exceed capped at the buffer)", True), ("verl (not capped)", False)]
)
def test_overlong(golden, variant, capped) -> None:
    case = golden("F01")
    found = shaping.overlong_penalty(
        case.tensor(case.inputs["lengths"]), max_tokens=100, buffer_tokens=20, factor=1.0, capped=capped
    )
    case.check(found, case.expected[variant])


def test_overlong_refuses_an_empty_buffer() -> None:
    with pytest.raises(ValueError, match="buffer_tokens = 0"):
        shaping.overlong_penalty(torch.ones(1), max_tokens=10, buffer_tokens=0)


@pytest.mark.parametrize(
    ("coefficient", "scale_negative", "expected"),
    [
        (0.5, False, [0.5, 1.0, -1.0, -1.0]),
        (0.5, True, [0.5, 1.0, -0.5, -1.0]),
        (0.0, False, [0.0, 1.0, -1.0, -1.0]),
        (-0.25, False, [-0.25, 1.0, -0.25, -1.0]),
    ],
)
def test_stop_properly(coefficient, scale_negative, expected) -> None:
    rewards = torch.tensor([1.0, 1.0, -1.0, -1.0])
    truncated = torch.tensor([True, False, True, False])
    found = shaping.stop_properly(rewards, truncated, coefficient=coefficient, scale_negative=scale_negative)
    assert found.tolist() == expected


def test_missing_eos_clip_and_length() -> None:
    rewards = torch.tensor([1.0, 30.0, -5.0])
    assert shaping.missing_eos_penalty(rewards, torch.tensor([True, False, False]), penalty=0.5).tolist() == [
        1,
        29.5,
        -5.5,
    ]
    clipped, changed = shaping.clip(rewards, low=-2.0, high=10.0)
    assert clipped.tolist() == [1, 10, -2]
    assert changed.tolist() == [False, True, True]
    assert shaping.per_length(rewards, torch.tensor([10, 20, 0]), reference=10.0).tolist() == [1, 15, -5]


def test_clip_comes_before_group_shaping(golden) -> None:
    case = golden("C02")
    rewards, _ = shaping.clip(case.tensor(case.inputs["rewards"]), low=-10.0, high=10.0)
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


def test_normalise_over_each_set() -> None:
    moments = RunningMoments().merged(REWARDS)
    assert moments.mean == pytest.approx(0.375)
    assert moments.std() == pytest.approx(0.51754917)
    batch = shaping.normalise(REWARDS, mean="batch", std="batch", eps=0.0)
    running = shaping.normalise(REWARDS, mean="running", std="running", running=moments, eps=0.0)
    torch.testing.assert_close(batch, (REWARDS - 0.375) / 0.517549169506766)
    torch.testing.assert_close(running, batch)
    group = shaping.normalise(REWARDS, mean="group", std="group", group_ids=GROUPS, eps=0.0)
    assert group.tolist() == pytest.approx(
        [0.8660254, -0.8660254, -0.8660254, 0.8660254, -0.5, -0.5, -0.5, 1.5]
    )
    mixed = shaping.normalise(REWARDS, mean="batch", std="group", group_ids=GROUPS, eps=0.0)
    assert mixed.shape == (8,)
    assert float(mixed[0]) == pytest.approx((1 - 0.375) / 0.5773502691896257)


def test_normalise_leaves_out_a_division_by_nothing() -> None:
    same = torch.full((4,), 0.9)
    centred = shaping.normalise(same, mean="batch", std="batch").tolist()
    assert centred == pytest.approx([0.0] * 4, abs=1e-7)
    assert shaping.normalise(same, std="group", group_ids=torch.zeros(4)).tolist() == same.tolist()


def test_running_moments_merge_as_one() -> None:
    values = torch.tensor([1.0, 5.0, -3.0, 2.0, 2.5, 9.0], dtype=torch.float64)
    pieces = RunningMoments().merged(values[:1]).merged(values[1:4]).merged(values[4:]).merged(values[:0])
    assert pieces.mean == pytest.approx(float(values.mean()), abs=1e-12)
    assert pieces.std() == pytest.approx(float(values.std()), abs=1e-12)
    assert RunningMoments(**pieces.state()) == pieces
    assert RunningMoments().merged(values[:1]).std() == 0.0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="rewards: nan in sample 1"):
        shaping.clip(torch.tensor([0.0, float("nan")]), low=0.0)
    with pytest.raises(ValueError, match="unknown mean 'groups': did you mean 'group'"):
        shaping.normalise(REWARDS, mean="groups")
    with pytest.raises(ValueError, match="group_ids: "):
        shaping.normalise(REWARDS, mean="group")
    with pytest.raises(ValueError, match="running: moments"):
        shaping.normalise(REWARDS, std="running")
    with pytest.raises(ValueError, match="low = 2 must be below high = 1"):
        shaping.clip(REWARDS, low=2, high=1)
    with pytest.raises(ValueError, match=r"coefficient = 1.5"):
        shaping.stop_properly(REWARDS, torch.zeros(8, dtype=torch.bool), coefficient=1.5)
    with pytest.raises(TypeError, match=r"truncated: dtype torch.float32"):
        shaping.stop_properly(REWARDS, torch.zeros(8), coefficient=0.5)
    with pytest.raises(ValueError, match=r"finished: shape \(2,\)"):
        shaping.missing_eos_penalty(REWARDS, torch.zeros(2, dtype=torch.bool), penalty=1.0)
