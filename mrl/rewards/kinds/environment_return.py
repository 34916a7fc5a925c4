"""The reward that an episode's environment gave: the sum over its turns. Read off the sample; no process looks at it."""

from __future__ import annotations

import numpy as np

from mrl.errors import ConfigError
from mrl.rewards.contract import RewardKind, Stage, Verifier, no_reward
from mrl.samples import Sample, Transcript, Verdict, VerdictKind


class EnvironmentReturn(RewardKind):
    """`reward.kind: environment`; the pool answers by `return_of`."""

    def verifier(self, stage: Stage) -> Verifier:
        raise ConfigError(
            "reward.kind = environment looks at no response: the environment gives the reward, turn by turn"
        )


def return_of(sample: Sample) -> Verdict | None:
    """The sum of the turns' rewards, each of which stands on its turn's last token; None for a sample that is no episode.

    An episode that reached a limit before its environment gave a reward has the sum of none, 0. One that its environment ended
    without ever giving a reward has none.
    """
    transcript = sample.transcript
    if transcript is None:
        return None
    given = [(turn.end - 1, turn.reward) for turn in transcript.turns if turn.reward is not None]
    if not given and transcript.ended_by == "env_done":
        return no_reward("the environment ended the episode without a reward")
    values = np.full(len(sample.response_tokens), np.nan, np.float32)
    values[-1:] = 0.0
    for position, reward in given:
        values[position] = reward
    return Verdict(
        VerdictKind.SCORED,
        float(sum(reward for _, reward in given)),
        _said(transcript),
        verifier="environment",
        seconds=sum(turn.seconds for turn in transcript.turns),
        token_values=values,
        is_return=True,
    )


def _said(transcript: Transcript) -> str:
    return f"{transcript.ended_by}: {transcript.reason}" if transcript.reason else transcript.ended_by
