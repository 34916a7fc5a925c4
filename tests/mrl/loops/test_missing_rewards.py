"""Failures that are not at random raise an alarm; those at random do not."""

import weakref

import numpy as np
import pytest

from mrl.loops.missing_rewards import MissingRewards
from mrl.samples import Group, Prompt, Sample, Status
from tests.support.samples import make_sample, verdict_of


def step(seed: int, fails) -> list[Group]:
    """A step of 64 samples of lengths that spread, with two tags and 10 % truncated; `fails(sample, rng)` have no reward."""
    rng, groups = np.random.default_rng(seed), []
    for prompt in range(16):
        tag = "hard" if prompt % 4 == 0 else "easy"
        samples = []
        for index in range(4):
            status = Status.TRUNCATED if rng.random() < 0.1 else Status.FINISHED
            length = max(2, int(rng.lognormal(3.0, 0.7)))
            sample = make_sample(prompt, index, length=length, tag=tag, status=status)
            samples.append(sample.with_verdict(verdict_of(None if fails(sample, rng) else 1.0)))
        groups.append(Group(Prompt(prompt, np.zeros(1, np.int32), "", "1"), tuple(samples)))
    return groups


def long_ones(sample: Sample, rng: np.random.Generator) -> bool:
    return len(sample.response_tokens) > 50


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (long_ones, "times as long"),
        (lambda s, rng: s.status is Status.TRUNCATED, "status truncated in"),
        (lambda s, rng: s.tag == "hard" and rng.random() < 0.4, "tag hard in"),
    ],
)
def test_a_judge_that_fails_on_some_kind_is_noticed_within_two_steps(fails, words: str) -> None:
    for seed in range(10):
        unlike = MissingRewards()
        looks = [unlike.look(step(100 * seed + number, fails)) for number in range(2)]
        metrics, found = looks[-1]
        assert metrics["reward/no_reward_unlike"] == 1.0 and words in "; ".join(found), (seed, metrics)


def test_failures_at_random_raise_no_alarm() -> None:
    alarms = 0.0
    for seed in range(25):
        unlike = MissingRewards()
        for number in range(8):
            metrics, _ = unlike.look(step(100 * seed + number, lambda s, rng: rng.random() < 0.05))
            alarms += metrics.get("reward/no_reward_unlike", 0.0)
    assert alarms / 200 < 0.02


def test_without_such_samples_or_with_nothing_else_there_is_nothing_to_compare() -> None:
    unlike = MissingRewards()
    assert unlike.look(step(0, lambda s, rng: False)) == ({}, [])
    assert MissingRewards().look(step(0, lambda s, rng: True)) == ({}, [])
    for number in range(8):
        unlike.look(step(number, long_ones))
    for number in range(8):
        metrics, found = unlike.look(step(number, lambda s, rng: False))
    assert (metrics, found) == ({}, []), "only the newest steps count"


def test_samples_that_were_looked_at_are_not_held() -> None:
    """Eight steps of 8,192 responses of 2,000 tokens are gigabytes."""
    unlike, groups = MissingRewards(), step(0, long_ones)
    tokens = [weakref.ref(sample.response_tokens) for group in groups for sample in group.samples]
    unlike.look(groups)
    del groups
    assert not any(array() is not None for array in tokens)
