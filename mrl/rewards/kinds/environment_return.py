"""Reward kind `environment`: the sum of an episode's turn rewards, read off the sample without a worker."""

from __future__ import annotations

import numpy as np

from mrl.errors import ConfigError
from mrl.rewards.contract import RewardKind, Stage, Verifier, no_reward
from mrl.samples import Sample, Transcript, Verdict, VerdictKind


class EnvironmentReturn(RewardKind):
    """Reward kind `environment`, which has no verifier: the reward pool calls `return_of`."""

    def verifier(self, stage: Stage) -> Verifier:
        raise ConfigError(
            "reward.kind = environment has no verifier: the environment gives a reward per turn"
        )


def return_of(sample: Sample) -> Verdict | None:
    """Return the sum of the turn rewards, each on its turn's last token; None if this is not an episode.

    Without any turn reward, an episode that reached a limit scores 0; one that its environment ended gets no
    reward.
    """
    transcript = sample.transcript
    if transcript is None:
        return None
    rewards = [(turn.end - 1, turn.reward) for turn in transcript.turns if turn.reward is not None]
    if not rewards and transcript.ended_by == "env_done":
        return no_reward("the environment ended the episode without a reward")
    values = np.full(len(sample.response_tokens), np.nan, np.float32)
    values[-1:] = 0.0
    for position, reward in rewards:
        values[position] = reward
    return Verdict(
        VerdictKind.SCORED,
        float(sum(reward for _, reward in rewards)),
        _end_reason(transcript),
        verifier="environment",
        seconds=sum(turn.seconds for turn in transcript.turns),
        token_values=values,
        is_return=True,
    )


def _end_reason(transcript: Transcript) -> str:
    return f"{transcript.ended_by}: {transcript.reason}" if transcript.reason else transcript.ended_by
