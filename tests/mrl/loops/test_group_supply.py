"""The supply over scripted engines: refills, surplus, budget, order and resume."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from mrl.errors import RewardError
from mrl.loops.nan_guard import BadNumbers
from mrl.routes import RouteRows, Routes
from mrl.samples import Prompt, Status
from tests.mrl.loops.scripted import Scripted, mixed, useful

FILTER: dict[str, object] = {"filter": {"min_reward_range": 0.0, "max_rounds": 3}}


def test_without_a_filter_a_step_is_one_round(tmp_path: Path) -> None:
    script = Scripted(tmp_path, {}, reward=lambda prompt, sample: 1.0)
    assert script.step()[0] == [0, 1, 2, 3] and script.step()[0] == [4, 5, 6, 7]
    assert script.asked() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_refills_are_whole_rounds_and_what_is_over_serves_the_next_step(tmp_path: Path) -> None:
    """Three of the first four groups are filtered: a second whole round follows; one group is surplus."""
    script = Scripted(tmp_path, FILTER, reward=useful(2, *range(4, 100)))
    chosen, metrics = script.step()
    assert chosen == [2, 4, 5, 6] and script.asked() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (metrics["group/rounds"], metrics["group/resampled"], metrics["group/surplus"]) == (2, 4, 1)
    assert (metrics["group/short"], metrics["rollout/groups"], metrics["policy/staleness_max"]) == (0, 4, 0)
    assert metrics["group/all_correct_frac"] == 3 / 8
    chosen, metrics = script.step(version=1)
    assert chosen == [7, 8, 9, 10], "the surplus comes first, by prompt index"
    assert script.asked()[2:] == [[8, 9, 10, 11]]
    assert (metrics["policy/staleness_max"], metrics["group/stale_frac"]) == (1, 0.25)
    assert metrics["policy/stale_token_frac"] == 0.25


def test_groups_of_a_domain_with_a_teacher_are_kept_whatever_their_rewards(tmp_path: Path) -> None:
    teachers = {"distillation": {"teachers": {"default": str(tmp_path)}}}
    script = Scripted(tmp_path, FILTER | teachers, reward=lambda prompt, sample: 1.0)
    chosen, metrics = script.step()
    assert chosen == [0, 1, 2, 3] and script.asked() == [[0, 1, 2, 3]]
    assert metrics["group/kept_frac"] == 1


def test_groups_are_chosen_by_prompt_and_never_by_who_finished_first(tmp_path: Path) -> None:
    """Verdicts come in reverse order; the same groups are chosen."""
    script = Scripted(tmp_path, FILTER, reward=useful(1, 3, 4, 5, 6, 7))
    assert script.step()[0] == [1, 3, 4, 5]
    assert [group.prompt.index for group in script.supply._surplus] == [6, 7]


def test_a_step_of_surplus_alone_asks_nobody_and_measures_no_version(tmp_path: Path) -> None:
    script = Scripted(tmp_path, FILTER, "loop.prompts_per_step=3", reward=useful(2, 3, 4, 5, 6, 7, 8))
    assert script.step()[0] == [2, 3, 4] and script.asked() == [[0, 1, 2], [3, 4, 5]]
    assert script.step(version=1)[0] == [5, 6, 7]
    script.supply.restore(
        script.supply.state() | {"surplus": script.supply.state()["surplus"] * 3}, version=9
    )
    before = len(script.asked())
    supplied = script.supply.take(script.rollouts, version=2)
    assert supplied.served_version == -1 and len(script.asked()) == before
    assert supplied.metrics["group/rounds"] == 0 and supplied.metrics["reward/no_reward_frac"] == 0


def test_the_served_version_is_that_of_new_samples(tmp_path: Path) -> None:
    script = Scripted(tmp_path, FILTER, reward=useful(2, *range(4, 100)))
    assert script.supply.take(script.rollouts, version=0).served_version == 0
    script.engines.version = 7
    assert script.supply.take(script.rollouts, version=7).served_version == 7


@pytest.mark.parametrize(("limit", "most_prompts", "rounds"), [(2, 4096, 2), (4, 9, 3)])
def test_a_budget_ends_in_fewer_groups(
    limit: int, most_prompts: int, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrl.loops.group_supply.MOST_PROMPTS", most_prompts)
    words = f"algorithm.filter={{min_reward_range: 0.0, max_rounds: {limit}}}"
    script = Scripted(tmp_path, {}, words, reward=useful(1))
    chosen, metrics = script.step()
    assert chosen == [1] and len(script.asked()) == rounds
    assert (metrics["group/short"], metrics["group/rounds"]) == (3, rounds)


def test_a_resumed_supply_goes_on_with_the_same_groups(tmp_path: Path) -> None:
    """State travels as bytes; surplus groups keep samples, versions and rewards."""
    reward = useful(2, *range(4, 100))
    whole, first = (Scripted(tmp_path, FILTER, reward=reward) for _ in range(2))
    expected = [whole.step(version) for version in range(4)]
    assert [first.step(version) for version in range(2)] == expected[:2]
    resumed = Scripted(tmp_path, FILTER, reward=reward)
    resumed.supply.restore(pickle.loads(pickle.dumps(first.supply.state())), version=9)
    assert [resumed.step(version) for version in range(2, 4)] == expected[2:]


def test_surplus_groups_with_routes_are_asked_anew_by_a_resumed_supply(tmp_path: Path) -> None:
    """Their routes were lost with the processes; no prompt is lost or trained twice."""
    reward = useful(2, *range(4, 100))
    words = "routing.replay=engine"
    first, resumed, again = (Scripted(tmp_path, FILTER, words, reward=reward) for _ in range(3))
    for script in (first, resumed, again):
        script.engines.routes = Routes((RouteRows(object(), 0, 2),))
    chosen, metrics = first.step()
    assert chosen == [2, 4, 5, 6] and metrics["routing/rows_missing"] == 0
    resumed.supply.restore(first.supply.state(), version=9)
    again.supply.restore(resumed.supply.state(), version=9)
    for script in (resumed, again):
        assert script.step(1)[0] == [7, 8, 9, 10] and script.asked() == [[7, 8, 9, 10]]
        assert script.supply.state()["surplus"] == []
    assert resumed.step(2)[0] == [11, 12, 13, 14]


def test_samples_whose_routes_are_not_whole_failed(tmp_path: Path) -> None:
    script = Scripted(tmp_path, {}, "loop.max_no_reward_fraction=1.0")
    script.engines.routes = Routes((RouteRows(object(), 0, 2),), missing=1)
    groups = script.rollouts.groups([Prompt(0, np.array([3], np.int32), "", None)], script.sampling)
    assert {sample.status for group in groups for sample in group.samples} == {Status.FAILED}
    _, metrics = script.step()
    assert metrics["routing/rows_missing"] == 16


def test_too_many_samples_without_a_reward_end_the_run(tmp_path: Path) -> None:
    words = "loop.max_no_reward_fraction=0.25"
    script = Scripted(tmp_path, {}, words, reward=lambda prompt, sample: None if sample == 0 else 1.0)
    _, metrics = script.step()
    assert metrics["reward/no_reward_length_ratio"] == 1 and metrics["reward/no_reward_frac"] == 0.25
    script = Scripted(tmp_path, {}, words, reward=lambda prompt, sample: None if sample < 2 else 1.0)
    with pytest.raises(RewardError, match=r"50\.0% of this step's samples have no reward"):
        script.step()


def test_a_reward_that_is_no_number_names_its_sample_before_the_filter(tmp_path: Path) -> None:
    script = Scripted(tmp_path, FILTER, reward=lambda p, s: np.inf if (p, s) == (2, 1) else mixed(p, s))
    with pytest.raises(BadNumbers, match=r"1 sample\(s\): 2\.1;"):
        script.step()


def test_surplus_of_weights_that_are_gone_is_asked_anew(tmp_path: Path) -> None:
    reward = useful(2, *range(4, 100))
    first, same, older = (Scripted(tmp_path, FILTER, reward=reward) for _ in range(3))
    assert first.step(version=3)[0] == [2, 4, 5, 6]
    assert same.supply.restore(first.supply.state(), version=3) == 0
    assert older.supply.restore(first.supply.state(), version=2) == 1
    assert same.step(4)[0] == older.step(4)[0] == [7, 8, 9, 10]
    assert (same.asked(), older.asked()) == ([[8, 9, 10, 11]], [[7, 8, 9, 10]])
