"""An episode only grows, trains only what the policy wrote, and ends for a reason that says whose it is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mrl.agents.episode import EndedBy, Episode, Limits, State
from mrl.errors import RolloutError

WIDE = Limits(max_turns=100, max_context=10_000)


def _turn(episode: Episode, tokens: list[int], *, version: int = 3, is_cut: bool = False) -> None:
    count = len(tokens)
    episode.add_turn(
        np.asarray(tokens, np.int32),
        np.full(count, -0.5, np.float32),
        np.full(count, version, np.int32),
        is_cut=is_cut,
    )


def test_two_turns() -> None:
    episode = Episode(np.asarray([1, 2], np.int32), WIDE)
    assert episode.state is State.WANTS_TOKENS and episode.context().tolist() == [1, 2]
    _turn(episode, [5, 6])
    assert episode.state is State.WANTS_STEP
    episode.observe(np.asarray([7, 8, 9], np.int32), reward=0.25)
    assert episode.state is State.WANTS_TOKENS and episode.context().tolist() == [1, 2, 5, 6, 7, 8, 9]
    _turn(episode, [10], version=4)
    episode.reward(1.0)
    episode.end(EndedBy.ENV_DONE)
    assert episode.response().tolist() == [5, 6, 7, 8, 9, 10]
    assert episode.loss_mask().tolist() == [True, True, False, False, False, True]
    assert episode.versions().tolist() == [3, 3, -1, -1, -1, 4]
    assert episode.logprobs().tolist() == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    rewards = episode.turn_rewards()
    assert rewards is not None and rewards.tolist() == [0.0, 0.25, 0.0, 0.0, 0.0, 1.0]


def test_random_episodes_are_the_concatenation_of_their_parts() -> None:
    rng = random.Random(0)
    for _ in range(300):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 5))]
        episode, wanted, mask = Episode(np.asarray(prompt, np.int32), WIDE), list(prompt), []
        for _ in range(rng.randint(1, 6)):
            wrote, said = ([rng.randrange(50) for _ in range(rng.randint(1, 6))] for _ in range(2))
            before = episode.context().tolist()
            _turn(episode, wrote)
            episode.observe(np.asarray(said, np.int32))
            wanted += wrote + said
            mask += [True] * len(wrote) + [False] * len(said)
            assert episode.context().tolist()[: len(before)] == before
        assert episode.context().tolist() == wanted
        assert episode.loss_mask().tolist() == mask and (episode.versions() < 0).tolist() == [
            not m for m in mask
        ]
        assert episode.turn_rewards() is None


@pytest.mark.parametrize(
    ("limits", "ended_by", "length"),
    [
        (Limits(max_turns=1, max_context=100), EndedBy.TURN_LIMIT, 2),
        (Limits(max_turns=9, max_context=6), EndedBy.CONTEXT_LIMIT, 2),
        (Limits(max_turns=9, max_context=7), None, 4),
    ],
)
def test_limits_end_an_episode_before_what_nobody_would_answer(
    limits: Limits, ended_by: EndedBy | None, length: int
) -> None:
    episode = Episode(np.asarray([1, 2], np.int32), limits)
    _turn(episode, [3, 4])
    episode.observe(np.asarray([5, 6], np.int32), reward=0.5)
    assert (episode.ended_by, episode.num_tokens) == (ended_by, length)
    rewards = episode.turn_rewards()
    assert rewards is not None and rewards[1] == 0.5, "the last turn keeps its reward"


def test_a_turn_that_is_cut_ends_it_and_the_first_reason_stays() -> None:
    episode = Episode(np.asarray([1], np.int32), WIDE)
    _turn(episode, [2, 3], is_cut=True)
    episode.end(EndedBy.ENV_CRASHED)
    assert episode.ended_by is EndedBy.TOKEN_LIMIT and not EndedBy.TOKEN_LIMIT.is_ours
    with pytest.raises(RolloutError, match="an answer of the environment came for an episode that is ended"):
        episode.observe(np.asarray([4], np.int32))


def test_out_of_turn_and_without_sense() -> None:
    episode = Episode(np.asarray([1], np.int32), WIDE)
    with pytest.raises(RolloutError, match="an episode that is wants_tokens"):
        episode.observe(np.asarray([2], np.int32))
    with pytest.raises(RolloutError, match="without tokens"):
        _turn(episode, [])
    _turn(episode, [2])
    with pytest.raises(RolloutError, match="an episode that is wants_step"):
        _turn(episode, [3])
    for reward in (float("nan"), float("inf")):
        with pytest.raises(RolloutError, match=r"gave the reward (nan|inf) to turn 1"):
            episode.observe(np.asarray([3], np.int32), reward=reward)
    assert episode.turns[0].reward is None and episode.num_tokens == 1


def test_ends_that_are_ours_are_told_from_the_policys() -> None:
    ours = {end for end in EndedBy if end.is_ours}
    assert {end.value for end in ours} == {
        "env_crashed",
        "env_unreachable",
        "env_deadline",
        "sandbox_lost",
        "engine_lost",
    }
