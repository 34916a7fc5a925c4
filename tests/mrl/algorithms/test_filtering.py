"""Which groups are kept, and their counts."""

import numpy as np
import pytest

from mrl.algorithms.filtering import Decision, DecisionCounts, decide
from mrl.config.sections.shaping import FilterSection

SPREAD = FilterSection()
MEAN = FilterSection(min_reward_range=None, mean_range=(0.0, 1.0))


@pytest.mark.parametrize(
    ("section", "variant"),
    [
        (SPREAD, "std filter keep iff std > 0 (DAPO, verl)"),
        (MEAN, "openrlhf keep iff 0 < mean < 1"),
        (MEAN, "roll difficulty_mask defaults (0,1) open interval"),
        (FilterSection(min_reward_range=None, mean_range=(-1.0, float("inf"))),
         "roll default mean_filter drop iff mean<=-1 or >=inf; keep"),
    ],
)  # fmt: skip
def test_golden(golden, section, variant) -> None:
    case = golden("F05")
    groups = {name: np.array(rewards, float) for name, rewards in case.inputs["groups"].items()}
    decisions = dict(zip(groups, decide(section, list(groups.values())), strict=True))
    for name, expected in case.expected.items():
        assert (decisions[name] is Decision.KEPT) == expected[variant], name


def test_reasons() -> None:
    rewards = [[1, 1], [0, 0], [0.5, 0.5], [0, 1], [1], [np.nan, np.nan], [np.nan, 1, 0], [0.9, 0.9 + 1e-9]]
    decisions = decide(SPREAD, [np.array(r, float) for r in rewards])
    names = [
        "all_correct",
        "all_incorrect",
        "no_spread",
        "kept",
        "all_correct",
        "no_reward",
        "kept",
        "no_spread",
    ]
    assert [d.value for d in decisions] == names
    both = FilterSection(mean_range=(0.2, 0.8))
    assert decide(both, [np.array([0, 0, 0, 0, 0, 1.0]), np.array([0, 1.0])]) == [
        Decision.MEAN_OUTSIDE,
        Decision.KEPT,
    ]
    wide = FilterSection(min_reward_range=0.5)
    assert decide(wide, [np.array([0.5, 1.0])]) == [Decision.NO_SPREAD]


def test_rates_divide_groups_by_groups(golden) -> None:
    case = golden("F09")
    account = DecisionCounts()
    account.add(decide(SPREAD, [np.zeros(4), np.ones(4)]), ["maths", "maths"])
    account.add(decide(SPREAD, [np.array([0, 1, 1, 1.0])] * 2), ["maths", "code"])
    metrics = account.metrics()
    assert metrics["group/kept_frac"] == case.expected["groups kept / prompts consumed"]
    assert metrics["group/generated"] == case.inputs["prompts_consumed"]
    assert metrics["group/kept"] == case.inputs["groups_kept"]
    assert metrics["group/all_correct_frac"] == metrics["group/all_incorrect_frac"] == 0.25
    assert metrics["group/kept_frac/code"] == 1.0
    assert metrics["group/kept_frac/maths"] == pytest.approx(1 / 3)
    assert DecisionCounts().metrics() == {"group/generated": 0.0}


def test_infinite_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards: inf"):
        decide(SPREAD, [np.array([np.inf, 0.0])])
