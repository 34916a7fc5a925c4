"""An episode's reward is its environment's, at the last token of each turn; without one there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mrl.rewards.kinds.environment_return import return_of
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool, try_verifiers
from mrl.samples import Prompt, Sample, Status, Transcript, Turn, VerdictKind
from tests.support.samples import make_sample

SECTION = RewardSection.model_validate({"kind": "environment"})


def episode(*turns: tuple[int, int, float | None], ended_by: str = "env_done", **fields: Any) -> Sample:
    recorded = tuple(Turn(start, end, "words", reward=reward, seconds=0.25) for start, end, reward in turns)
    return make_sample(length=turns[-1][1], transcript=Transcript(recorded, ended_by=ended_by), **fields)


def test_turns_rewards_stand_on_their_last_tokens() -> None:
    verdict = return_of(episode((0, 2, 0.5), (4, 5, None), (6, 8, 1.0)))
    assert verdict is not None and verdict.kind is VerdictKind.SCORED and verdict.is_return
    assert (verdict.value, verdict.seconds, verdict.reason) == (1.5, 0.75, "env_done")
    assert verdict.token_values is not None and verdict.token_values.dtype == np.float32
    np.testing.assert_array_equal(verdict.token_values, [np.nan, 0.5, *[np.nan] * 5, 1.0])


def test_an_episode_that_a_limit_ended_has_what_it_got_so_far() -> None:
    verdict = return_of(episode((0, 2, None), (4, 5, None), ended_by="turn_limit"))
    assert verdict is not None and verdict.value == 0.0 and verdict.token_values is not None
    assert np.flatnonzero(~np.isnan(verdict.token_values)).tolist() == [4]


def test_an_end_without_a_reward_is_no_reward() -> None:
    verdict = return_of(episode((0, 2, None)))
    assert (
        verdict is not None and verdict.kind is VerdictKind.NO_REWARD and "without a reward" in verdict.reason
    )


def test_the_pool_answers_without_a_process_and_never_scores_what_failed() -> None:
    prompt = Prompt(0, np.zeros(1, np.int32), "", None)
    failed = episode((0, 2, 1.0), ended_by="env_crashed", index=1, status=Status.FAILED)
    with RewardPool(SECTION) as pool:
        pool.submit_all([(episode((0, 2, 1.0)), prompt), (failed, prompt)])
        verdicts = dict(pool.collect(5.0))
    assert verdicts["0.0"].value == 1.0
    assert verdicts["0.1"].value is None and "the episode ended by env_crashed" in verdicts["0.1"].reason
    try_verifiers(SECTION, [prompt])


def test_it_is_no_part_of_a_sum() -> None:
    with pytest.raises(ValidationError, match="kind = environment cannot be one of parts"):
        RewardSection.model_validate({"parts": [{"kind": "environment"}, {"kind": "format"}]})
