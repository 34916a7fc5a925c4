"""Each rule fires on its failure and names it first; none fires on a run that learns."""

from typing import Any

import numpy as np
import pytest

from mrl.diagnosis.closing import closing_line, learned_nothing
from mrl.diagnosis.metric_arrays import initial_value, recent, standing
from mrl.diagnosis.quality import quality
from mrl.diagnosis.rules import diagnose
from mrl.observe.metric_curves import Curves
from tests.support.made_rows import made
from tests.support.recorded_rows import recorded

SETTINGS = {
    "training.optimizer.lr": "0.0002",
    "critic.optimizer.lr": "0.05",
    "critic.warmup_steps": "5",
    "algorithm.correction.kind": "geometric",
    "sync.verify": "wire",
    "algorithm.filter": "null",
    "algorithm.kl.location": "off",
    "algorithm.kl.coefficient": "0.0",
    "loop.samples_per_prompt": "8",
    "rollout.dtype": "float32",
    "training.dtype": "float32",
}
MADE = {
    "engines_apart": {"policy/rollout_mismatch_kl": (0.02, 0.5)},
    "critic_lost": {"critic/error_squared": (1.0, 40.0), "critic/explained_variance": (-1.0, -50.0)},
    "reward_hacked": {"val/reward": (0.3, 0.1), "reward/cue": (0.2, 0.9)},
    "rows_memorised": {"val/reward": (0.3, 0.1)},
    "policy_collapsed": {"val/reward": (0.1, 0.0), "reward/mean": (0.1, 0.0)},
    "entropy_collapsed": {
        "policy/entropy": (0.05, 0.01),
        "rollout/distinct_frac": (0.2, 0.13),
        "group/all_incorrect_frac": (0.5, 0.5),
        "reward/mean": (0.5, 0.5),
        "val/reward": (0.52, 0.52),
    },
    "data_solved": {"group/degenerate_samples_frac": (0.95, 1.0), "group/all_correct_frac": (0.9, 1.0)},
    "no_gradient": {
        "group/degenerate_samples_frac": (0.95, 1.0),
        "group/all_incorrect_frac": (0.9, 0.9),
        "group/all_correct_frac": (0.05, 0.05),
    },
    "verifier_silent": {"reward/no_reward_frac": (0.04, 0.05)},
}
"""Rule -> the changes at step 40 of a healthy run."""


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [f.rule for f in diagnose(Curves(rows), SETTINGS).findings]


def ever(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return rule -> the step at which it fires first, if diagnosed after every step."""
    curves, first = Curves(), {}
    for row in rows:
        curves.add(row)
        for finding in diagnose(curves, SETTINGS).findings:
            first.setdefault(finding.rule, row["step"])
    return first


@pytest.mark.parametrize("rule", MADE)
def test_a_rule_fires_on_its_failure_and_knows_since_when(rule: str) -> None:
    findings = diagnose(Curves(made(MADE[rule])), SETTINGS).findings
    assert [f.rule for f in findings][:1] == [rule]
    assert 35 <= findings[0].since <= 60 and findings[0].last == 80
    assert findings[0].evidence and findings[0].levers


def test_a_correction_that_takes_the_gradient_is_named() -> None:
    rows = made()
    for row in rows:
        row["policy/correction_gradient_frac"] = 0.9 if row["step"] < 40 else 0.04
        row["policy/correction_weight"] = 0.03
    (finding,) = diagnose(Curves(rows), SETTINGS).findings
    assert finding.rule == "correction_takes_gradient" and 40 <= finding.since <= 45
    assert "policy/correction_weight is 0.03" in finding.evidence
    assert finding.levers[0].text.startswith("algorithm.correction.kind=truncated (now geometric)")
    assert names([row | {"policy/correction_gradient_frac": 0.5} for row in rows]) == []


def test_a_policy_that_slowly_unlearns_is_named() -> None:
    """Beyond chance in validation and reward: 512 validation prompts, 2 % noise of the reward."""
    assert names(made({"val/reward": (0.48, 0.48), "reward/mean": (0.45, 0.45)})) == ["policy_collapsed"]
    assert names(made({"val/reward": (0.55, 0.55), "reward/mean": (0.45, 0.45)})) == [], "within chance"


def test_spikes_of_the_gradient_count_where_the_validation_stalls() -> None:
    rows = made({"val/reward": (0.55, 0.55)})
    for step in (66, 70, 77):
        rows[step]["optim/grad_norm"] = 90.0
    assert names(rows) == ["gradient_spikes"]
    healthy = made()
    for step in (66, 70, 77):
        healthy[step]["optim/grad_norm"] = 90.0
    assert names(healthy) == [], "the validation rises"


def test_a_verifier_that_says_one_thing_from_the_start_is_named() -> None:
    rows = made()
    for row in rows[1:]:
        row["reward/max"] = row["reward/min"]
    assert names(rows)[0] == "verifier_silent"
    assert "verifier_silent" not in names(made({"reward/max": (0.0, 0.0)})), "it told samples apart before"


def test_rows_that_were_solved_before_the_run_are_told_from_a_verifier_that_says_one_thing() -> None:
    solved = {"reward/mean": 1.0, "reward/min": 1.0, "group/degenerate_samples_frac": 1.0}
    solved |= {"group/all_correct_frac": 1.0, "group/all_incorrect_frac": 0.0, "val/reward": 0.4}
    rows = [row | {name: value for name, value in solved.items() if name in row} for row in made()]
    assert names(rows) == ["data_solved"]
    assert names([row | {"val/reward": 1.0} for row in rows])[0] == "verifier_silent", "it passes all"


@pytest.mark.parametrize("seed", range(5))
def test_no_rule_fires_on_a_run_that_learns(seed: int) -> None:
    """Its entropy falls to a quarter, most groups lose their gradient, norms are never below 1."""
    assert ever(made(seed=seed)) == {}


@pytest.mark.parametrize("run", ["quickstart", "quickstart_ppo", "quickstart_dapo", "cispo"])
def test_no_rule_fires_on_a_recorded_run_at_any_step(run: str) -> None:
    assert ever(recorded(f"healthy_{run}")) == {}


@pytest.mark.parametrize(
    ("run", "rule", "by"),
    [
        ("rate_times_30", "policy_collapsed", 10),
        ("planted_cue", "reward_hacked", 15),
        ("stale_engines", "engines_apart", 14),
        ("critic_times_100", "critic_lost", 35),
        ("few_rows", "rows_memorised", 15),
    ],
)
def test_a_provoked_failure_is_named_first(run: str, rule: str, by: int) -> None:
    rows = recorded(run)
    assert names(rows)[0] == rule
    assert ever(rows)[rule] <= by


def test_without_a_gradient_after_a_collapse_the_collapse_is_said_to_be_the_cause() -> None:
    collapsed, empty, *_ = diagnose(Curves(recorded("rate_times_30")), SETTINGS).findings
    assert (collapsed.rule, empty.rule) == ("policy_collapsed", "no_gradient")
    assert any(
        lever.setting == "training.optimizer.lr" and lever.value == "2e-05" for lever in collapsed.levers
    )


def test_without_the_truth_beside_the_reward_no_way_round_it_can_be_told() -> None:
    diagnosis = diagnose(Curves(recorded("few_rows")), SETTINGS)
    assert "a reward of several parts" in diagnosis.cannot_tell["reward_hacked"]
    assert "rows_memorised" not in ever(recorded("planted_cue")), (
        "validation reads another part than is trained"
    )


LOST = [0.5, 0.02, 0.0, 0.0]
"""Entropies of the first steps with a learning rate of 10."""


@pytest.mark.parametrize(
    ("entropies", "rewards", "fires"),
    [
        (LOST, [0.3, 0.1, 0.0, 0.0], True),
        (LOST, [0.0, 0.0, 0.0, 0.0], True),
        (LOST, [0.3, 0.5, 0.9, 1.0], False),
        (LOST[:2], [0.3, 0.0], False),
        ([0.5, 0.4, 0.3, 0.2], [0.3, 0.1, 0.0, 0.0], False),
        ([0.5] * 12 + [0.0] * 5, [0.3] * 17, False),
        ([0.5, 0.0, *[0.4] * 5], [0.3, *[0.2] * 6], False),
    ],
)
def test_entropy_that_the_first_updates_take_is_the_learning_rates_fault(entropies, rewards, fires) -> None:
    """Not so in a run that solves its task so fast, ends there later, or recovers."""
    rows = [
        {"step": n, "policy/entropy": entropy, "reward/mean": reward}
        for n, (entropy, reward) in enumerate(zip(entropies, rewards, strict=True), 1)
    ]
    assert ("entropy_lost" in names(rows)) == fires


def flat_rows(steps: int, *, largest: float = 0.0) -> list[dict[str, Any]]:
    return [{"step": n, "advantage/abs_max": largest, "reward/mean": 0.0} for n in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("rows", "settings", "nothing"),
    [
        (flat_rows(5), {}, True),
        (flat_rows(4), {}, False),
        ([*flat_rows(4), {"step": 5}], {}, True),
        ([*flat_rows(8), {"step": 9, "advantage/abs_max": 1.5}], {}, False),
        ([{"step": n} for n in range(9)], {}, False),
        (flat_rows(5), {"algorithm.distillation.teachers.default": "t"}, False),
    ],
)
def test_a_run_in_which_no_sample_had_an_advantage_learned_nothing(rows, settings, nothing) -> None:
    """Only if it is measured, for at least five steps; teachers teach without advantages."""
    curves = Curves(rows)
    assert learned_nothing(curves, settings) == nothing
    assert ("nothing was learned" in closing_line("runs/a", "done", curves, settings)) == nothing


def test_the_last_line_has_the_first_finding() -> None:
    line = closing_line("runs/rate", "done", Curves(recorded("rate_times_30")), SETTINGS)
    assert line.startswith("runs/rate: done after step 60; policy_collapsed since step 10: ")
    assert line.endswith("(and 2 more); run `mrl diagnose runs/rate` to see what to change")
    healthy = Curves(recorded("healthy_quickstart"))
    assert closing_line("runs/a", "done", healthy, SETTINGS) == "runs/a: done after step 200"
    assert closing_line("runs/a", "done", Curves(), {}) == "runs/a: done after step 0"


def test_what_is_not_measured_is_said() -> None:
    rows = [{n: v for n, v in row.items() if not n.startswith("val/")} for row in recorded("planted_cue")]
    diagnosis = diagnose(Curves(rows), SETTINGS)
    assert "reward_hacked" in diagnosis.cannot_tell and "validation" in diagnosis.cannot_tell["reward_hacked"]
    assert "critic_lost" not in diagnosis.cannot_tell, "a run without a critic lacks nothing"
    assert "reward_hacked" not in [f.rule for f in diagnosis.findings]


def test_a_critic_that_explains_little_has_more_time_where_it_is_no_chance() -> None:
    """A start that solves most rows: 0.8 % of the variance, rows apart by as much."""
    rng = np.random.default_rng(0)
    rows = made({"critic/explained_variance": (0.001, 0.001)})
    for mean, early, late in ((0.008, [], ["critic_lost"]), (0.0, ["critic_lost"], ["critic_lost"])):
        for row in rows[1:61]:
            row["critic/explained_variance"] = float(rng.normal(mean, 0.008))
        assert (names(rows[:46]), names(rows[:61])) == (early, late)


def test_a_critic_that_explains_nothing_is_lost_also_without_a_growing_error() -> None:
    rows = made({"critic/explained_variance": (0.001, 0.001)})
    assert names(rows) == ["critic_lost"]
    still_warming = diagnose(Curves(rows), SETTINGS | {"critic.warmup_steps": "70"})
    assert still_warming.findings == []


def test_one_bad_validation_is_chance() -> None:
    rows = made({"reward/mean": (0.3, 0.95)})
    rows[80]["val/reward"] = 0.5
    assert names(rows) == []
    rows[75]["val/reward"] = 0.5
    assert names(rows) == ["rows_memorised"]


def test_rows_that_are_no_numbers_and_steps_made_again() -> None:
    rows = made()
    for row in rows[20:30]:
        row["reward/mean"] = row["optim/grad_norm"] = "nan"
    assert ever(rows) == {}
    curves = Curves([*rows, {"no": "step"}, {"step": 3, "reward/mean": 0.5}])
    assert curves.steps.tolist() == [0, 1, 2, 3] and curves.values("reward/mean")[-1] == 0.5


def test_curves_look_back_only() -> None:
    rows = recorded("planted_cue")
    whole = quality(Curves(rows))
    for last in (1, 6, 17, 44):
        part = quality(Curves(rows[:last]))
        assert whole is not None and part is not None
        for name in ("now", "best", "checks_since"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[:last])
        np.testing.assert_allclose(part.reward_change, whole.reward_change[:last])
    assert recent(np.array([np.nan, 1.0, 3.0, np.nan, 5.0]), 2).tolist()[1:] == [1.0, 2.0, 3.0, 5.0]
    assert initial_value(np.array([np.nan, 4.0, 1.0, 2.0])) == 2.0
    assert standing(np.array([True, False, True, True])) == 2 and standing(np.array([True, False])) is None
