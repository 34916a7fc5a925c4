"""Validation metrics: the mean reward always, an accuracy only if the reward is one."""

import dataclasses
from typing import Any

import pytest

from mrl.config.load import load_reward
from mrl.loops.validate import Scores, validation_metrics
from mrl.rewards.instructions.instruction_verifier import parse_checks, verify_instructions
from mrl.samples import Verdict, VerdictKind
from tests.support.samples import make_groups, make_sample


@pytest.mark.parametrize(
    ("reward", "is_accuracy"),
    [
        ({"kind": "maths"}, True),
        ({"kind": "maths", "min_reward": -1.0}, False),
        ({"kind": "maths", "weight": 2.0}, False),
        ({"kind": "code"}, True),
        ({"kind": "code", "code": {"partial": True}}, False),
        ({"kind": "instructions"}, True),
        ({"kind": "instructions", "instructions": {"partial": True}}, False),
        ({"kind": "format"}, True),
        ({"kind": "repetition"}, False),
        ({"kind": "plugin", "path": "a:b"}, False),
        ({"kind": "environment"}, False),
        ({"kind": "llm", "path": "http://a"}, True),
        ({"kind": "llm", "path": "http://a", "llm": {"choices": {"bad": 1, "good": 5}}}, False),
        ({"kind": "llm", "path": "http://a", "llm": {"verdict": "choice"}}, False),
        ({"kind": "reward_model", "path": "http://a", "server": {"tokenizer": "t"}}, False),
        ({"parts": [{"kind": "maths"}, {"kind": "repetition"}]}, True),
        ({"parts": [{"kind": "repetition"}, {"kind": "maths"}]}, False),
    ],
)
def test_the_mean_is_an_accuracy_if_the_kind_gives_0_and_1_alone(
    reward: dict[str, Any], is_accuracy: bool
) -> None:
    scores = [Scores("default", "", [1.0]), Scores("default", "", [0.0]), Scores("default", "", [None])]
    metrics = validation_metrics(scores, reward=load_reward(reward))
    assert metrics.pop("val/accuracy", None) == (0.5 if is_accuracy else None)
    assert metrics == {"val/reward": 0.5, "val/prompts": 3.0, "val/no_reward": 1.0}


def test_domains_of_both_sorts_have_what_fits_each() -> None:
    section = load_reward({"domains": {"sums": {"kind": "maths"}, "talk": {"kind": "plugin", "path": "a:b"}}})
    scores = [Scores("sums", "easy", [1.0]), Scores("sums", "hard", [0.0]), Scores("talk", "hard", [0.25])]
    metrics = validation_metrics(scores, scores, reward=section)
    assert metrics["val/avg@1"] == metrics["val/reward"] == pytest.approx(1.25 / 3)
    assert (metrics["val/reward/sums"], metrics["val/reward/talk"]) == (0.5, 0.25)
    assert (metrics["val/reward/easy"], metrics["val/reward/hard"]) == (1.0, 0.125)
    accuracies = {name for name in metrics if name.startswith("val/accuracy")}
    assert accuracies == {"val/accuracy/sums", "val/accuracy/easy"}


def test_the_first_of_several_verifiers_counts_and_of_one_its_value() -> None:
    checks = parse_checks([{"check": "no_commas"}, {"check": "all_lower_case"}], place="here")
    alone = dataclasses.replace(verify_instructions("A word", checks), verifier="instructions")
    assert next(iter(alone.parts.values())) == 1.0 and alone.value == 0.0
    (groups,) = make_groups([dataclasses.replace(make_sample(), verdict=alone)])
    assert Scores.of(groups, load_reward({"kind": "instructions"})).of_samples == [0.0]
    several = Verdict(VerdictKind.SCORED, 0.7, parts={"maths": 1.0, "maths.place": 0.0, "repetition": -0.3})
    (groups,) = make_groups([dataclasses.replace(make_sample(), verdict=several)])
    reward = load_reward({"parts": [{"kind": "maths"}, {"kind": "repetition"}]})
    assert Scores.of(groups, reward).of_samples == [1.0]
