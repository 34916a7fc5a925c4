"""An episode only grows, trains only the policy's tokens, and ends for a reason with an owner."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from mrl.agents.episode import EndedBy, Episode, EpisodeState, Limits
from mrl.errors import RolloutError
from mrl.samples import Prompt, ResponseSegment, Status, Turn

WIDE = Limits(max_turns=100, max_context=10_000, max_tokens=10_000, max_turn_tokens=10_000)
PROMPT = Prompt(4, np.asarray([1, 2], np.int32), "", None, domain="games", tag="t")


def _turn(episode: Episode, tokens: list[int], *, version: int = 3, is_cut: bool = False) -> None:
    count = len(tokens)
    segments = [ResponseSegment(0, count, version, 0, 0, 0)] if count else []
    logprobs = np.full(count, -0.5, np.float32)
    episode.add_turn(np.asarray(tokens, np.int32), logprobs, segments, text=str(tokens), is_cut=is_cut)


def _observe(episode: Episode, tokens: list[int], **answer: Any) -> None:
    episode.record_answer("said", **answer)
    episode.observe(np.asarray(tokens, np.int32))


def test_two_turns() -> None:
    episode = Episode(PROMPT.tokens, WIDE, opening="begin")
    assert episode.state is EpisodeState.WANTS_TOKENS and episode.context().tolist() == [1, 2]
    _turn(episode, [5, 6])
    assert episode.state is EpisodeState.WANTS_STEP
    _observe(episode, [7, 8, 9], reward=0.25, seconds=2.0)
    assert episode.state is EpisodeState.WANTS_TOKENS and episode.context().tolist() == [1, 2, 5, 6, 7, 8, 9]
    _turn(episode, [10], version=4)
    episode.record_answer("", reward=1.0)
    episode.end(EndedBy.ENV_DONE, "right")
    sample = episode.sample(PROMPT, 3, status=Status.FINISHED, text="words")
    assert sample.sample_id == "4.3" and (sample.domain, sample.tag) == ("games", "t")
    assert sample.response_tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert sample.loss_mask.tolist() == [True, True, False, False, False, True]
    assert sample.policy_versions.tolist() == [3, 3, -1, -1, -1, 4]
    assert sample.rollout_logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    assert [(s.start, s.end, s.version) for s in sample.segments] == [(0, 2, 3), (5, 6, 4)]
    transcript = episode.transcript(faults=1)
    assert transcript.turns == (Turn(0, 2, "[5, 6]", "said", 0.25, 2.0), Turn(5, 6, "[10]", "", 1.0))
    assert (transcript.opening, transcript.ended_by, transcript.reason) == ("begin", "env_done", "right")
    assert (transcript.faults, transcript.restarts) == (1, 0)


def test_random_episodes_are_the_concatenation_of_their_parts() -> None:
    rng = random.Random(0)
    for _ in range(300):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 5))]
        episode, wanted, mask = Episode(np.asarray(prompt, np.int32), WIDE), list(prompt), []
        for _ in range(rng.randint(1, 6)):
            wrote, observed = ([rng.randrange(50) for _ in range(rng.randint(1, 6))] for _ in range(2))
            before = episode.context().tolist()
            _turn(episode, wrote)
            _observe(episode, observed)
            wanted += wrote + observed
            mask += [True] * len(wrote) + [False] * len(observed)
            assert episode.context().tolist()[: len(before)] == before
        assert episode.context().tolist() == wanted
        sample = episode.sample(PROMPT, 0, status=Status.FINISHED, text="")
        assert sample.loss_mask.tolist() == mask
        assert (sample.policy_versions < 0).tolist() == [not m for m in mask]


@pytest.mark.parametrize(
    ("limits", "ended_by", "length"),
    [
        ({"max_turns": 1}, EndedBy.TURN_LIMIT, 2),
        ({"max_context": 6}, EndedBy.CONTEXT_LIMIT, 2),
        ({"max_context": 7}, None, 4),
        ({"max_tokens": 4}, EndedBy.CONTEXT_LIMIT, 2),
        ({"max_tokens": 5}, None, 4),
        ({"max_turn_tokens": 1}, None, 4),
    ],
)
def test_limits_end_an_episode_before_what_nobody_would_answer(limits, ended_by, length) -> None:
    episode = Episode(np.asarray([1, 2], np.int32), dataclasses.replace(WIDE, **limits))
    _turn(episode, [3, 4])
    _observe(episode, [5, 6], reward=0.5)
    assert (episode.ended_by, episode.num_tokens) == (ended_by, length)
    assert episode.turns[0].reward == 0.5, "the last turn keeps its reward"
    assert ended_by is not None or episode.budget >= 1


def test_what_a_turn_may_have() -> None:
    limits = Limits(max_turns=9, max_context=12, max_tokens=8, max_turn_tokens=5)
    episode = Episode(np.asarray([1, 2], np.int32), limits)
    assert episode.budget == 5
    _turn(episode, [3, 4])
    _observe(episode, [5, 6])
    assert episode.budget == 4
    episode = Episode(np.arange(6, dtype=np.int32), dataclasses.replace(limits, max_turn_tokens=8))
    assert episode.budget == 6


def test_one_bad_call_too_many() -> None:
    episode = Episode(np.asarray([1], np.int32), dataclasses.replace(WIDE, max_bad_calls=1))
    for ended_by in (None, EndedBy.BAD_CALL):
        _turn(episode, [2])
        episode.record_answer("no such tool")
        episode.bad_call()
        assert episode.ended_by is ended_by
        if ended_by is None:
            episode.observe(np.asarray([3], np.int32))


def test_what_a_limit_ended_is_truncated_and_what_we_ended_has_failed() -> None:
    kinds = {status: {end.value for end in EndedBy if end.status is status} for status in Status}
    assert kinds[Status.TRUNCATED] == {"turn_limit", "context_limit", "token_limit"}
    assert kinds[Status.FAILED] == {end.value for end in EndedBy if end.is_infrastructure_failure}


def test_a_turn_that_is_cut_ends_it_and_the_first_reason_stays() -> None:
    episode = Episode(np.asarray([1], np.int32), WIDE)
    _turn(episode, [2, 3], is_cut=True)
    episode.end(EndedBy.ENV_CRASHED)
    assert episode.ended_by is EndedBy.TOKEN_LIMIT and not EndedBy.TOKEN_LIMIT.is_infrastructure_failure
    with pytest.raises(RolloutError, match="an answer of the environment came for an episode that is ended"):
        episode.record_answer("late")


def test_out_of_turn_and_without_sense() -> None:
    episode = Episode(np.asarray([1], np.int32), WIDE)
    for answer in (lambda: episode.record_answer(""), lambda: episode.observe(np.asarray([2], np.int32))):
        with pytest.raises(RolloutError, match="an episode that is wants_tokens"):
            answer()
    with pytest.raises(RolloutError, match="without tokens"):
        _turn(episode, [])
    _turn(episode, [2])
    with pytest.raises(RolloutError, match="an episode that is wants_step"):
        _turn(episode, [3])
    for reward in (float("nan"), float("inf")):
        with pytest.raises(RolloutError, match=r"turn 1 got the reward (nan|inf), "):
            episode.record_answer("", reward=reward)
    assert episode.turns[0].reward is None and episode.num_tokens == 1


def test_ends_that_are_ours_are_told_from_the_policys() -> None:
    ours = {end for end in EndedBy if end.is_infrastructure_failure}
    assert {end.value for end in ours} == {
        "env_crashed",
        "env_unreachable",
        "env_deadline",
        "sandbox_lost",
        "engine_lost",
    }
