"""Similarity of responses, on groups with known results."""

import dataclasses

import numpy as np
import pytest

from mrl.loops.response_similarity import response_similarity
from mrl.samples import Sample
from tests.support.samples import make_groups, make_sample, verdict_of


def sample(prompt: int, index: int, tokens: list[int], reward: float = 0.0) -> Sample:
    made = make_sample(prompt, index, length=len(tokens), verdict=verdict_of(reward))
    return dataclasses.replace(made, response_tokens=np.array(tokens, np.int32))


def test_the_distinct_share_is_a_mean_over_groups() -> None:
    groups = make_groups([sample(0, n, [n // 2]) for n in range(4)] + [sample(1, n, [7]) for n in range(4)])
    assert response_similarity(groups)["rollout/distinct_frac"] == pytest.approx((2 / 4 + 1 / 4) / 2)


def test_a_run_of_tokens_that_responses_share_is_found_wherever_it_stands() -> None:
    run = [5, 4, 3, 2, 1, 2, 3, 4]
    samples = [sample(0, n, [100 + n] * n + run + [200 + n] * 3) for n in range(3)]
    samples += [sample(0, 3, list(range(300, 320))), sample(0, 4, [9] * 30)]
    assert response_similarity(make_groups(samples))["rollout/shared_run_frac"] == pytest.approx(3 / 5)
    short = make_groups([sample(0, n, [1, 2]) for n in range(4)])
    assert "rollout/shared_run_frac" not in response_similarity(short)


def test_length_explains_reward_within_groups_alone() -> None:
    """One group is long and good, one short and bad; within each, the correlation is none or full."""
    lengths, rewards = [2, 4, 6, 8], [1.0, 0.0, 0.0, 1.0]

    def both(rewards: list[float]) -> float:
        samples = [
            sample(prompt, n, [1] * (10 * prompt + length), prompt + rewards[n])
            for prompt in range(2)
            for n, length in enumerate(lengths)
        ]
        return response_similarity(make_groups(samples))["reward/length_correlation"]

    assert both(rewards) == pytest.approx(0.0, abs=1e-12)
    assert both([0.2, 0.4, 0.6, 0.8]) == pytest.approx(1.0)
    assert "reward/length_correlation" not in response_similarity(
        make_groups([sample(0, n, [1]) for n in range(2)])
    )
