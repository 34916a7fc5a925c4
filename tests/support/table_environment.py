"""A small in-process environment with the protocol of the environments' processes."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mrl.agents.answer import EnvironmentResult
from mrl.agents.environment_client import Environments
from mrl.agents.episode import EndedBy, Limits
from mrl.agents.render import Observation
from mrl.agents.tool_calls import ToolCall
from mrl.rewards.contract import no_reward
from mrl.rewards.kinds.environment_return import return_of
from mrl.samples import Prompt, Sample, Status, Verdict, VerdictKind
from mrl.trajectories.environment_rollout import EpisodeRules


@dataclasses.dataclass
class _Game:
    rng: random.Random
    length: int
    turns: int = 0


class TableEnvironments:
    """Games of one to four turns with seeded digits, `lateness` polls late; rewards follow text length."""

    def __init__(
        self, *, lateness: int = 1, opens_with: str = "", faults: Mapping[str, EndedBy] | None = None
    ) -> None:
        """`faults`: the end of a key's first turn."""
        self._lateness, self._opens_with, self._faults = lateness, opens_with, dict(faults or {})
        self.open_games: dict[str, _Game] = {}
        self.opened: list[tuple[str, str, Mapping[str, Any], int]] = []
        self.calls: collections.defaultdict[str, list[Sequence[ToolCall]]] = collections.defaultdict(list)
        self._answers: list[tuple[int, EnvironmentResult]] = []
        self._polls = 0

    def open(self, key: str, environment: str, task: Mapping[str, Any], seed: int) -> None:
        rng = random.Random(seed)
        self.open_games[key] = _Game(rng, rng.randint(1, 4))
        self.opened.append((key, environment, task, seed))
        messages = ({"role": "user", "content": self._opens_with},) if self._opens_with else ()
        self._say(EnvironmentResult(key, 0, messages))

    def step(self, key: str, text: str, calls: Sequence[ToolCall] = ()) -> None:
        game = self.open_games[key]
        game.turns += 1
        self.calls[key].append(calls)
        if key in self._faults:
            self._say(
                EnvironmentResult(key, game.turns, ended_by=self._faults[key], reason="as the test says")
            )
            return
        done = game.turns == game.length
        digit = (game.rng.randrange(6) + len(text)) % 6
        messages = () if done else ({"role": "tool" if calls else "user", "content": str(digit)},)
        ended_by = EndedBy.ENV_DONE if done else None
        self._say(EnvironmentResult(key, game.turns, messages, len(text) / 8, done, ended_by, seconds=0.5))

    def close(self, key: str) -> None:
        del self.open_games[key]
        self._answers = [(due, answer) for due, answer in self._answers if answer.key != key]

    def poll(self, timeout_seconds: float) -> list[EnvironmentResult]:
        self._polls += 1
        ready = [answer for due, answer in self._answers if due <= self._polls]
        self._answers = [(due, answer) for due, answer in self._answers if due > self._polls]
        return ready

    has_unsent = True
    """An answer is near, so polls follow each other at once."""

    def descriptors(self) -> list[int]:
        return []

    def _say(self, answer: EnvironmentResult) -> None:
        self._answers.append((self._polls + self._lateness, answer))


class DigitRenderer:
    """Renders digits as tokens, with a 5 before and a 4 after the environment's text."""

    def opening(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        return np.array([int(c) for message in messages for c in message["content"]], np.int32)

    def after(self, last_token: int, observations: Sequence[Observation]) -> np.ndarray:
        digits = [int(c) for observation in observations for c in observation.text if c.isdigit()]
        return np.array([5, *digits, 4], np.int32)

    def opens_thought(self, tokens: np.ndarray) -> bool:
        return False


def digits(tokens: Sequence[int]) -> str:
    return "".join(map(str, tokens))


class Returns:
    """Scores with the rewards of the environments."""

    def deliver_to(self, deliver: Callable[[str, Verdict], None]) -> None:
        self._deliver = deliver

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        for sample, _ in pairs:
            failed = sample.status is Status.FAILED
            if sample.transcript is None:  # a single response
                verdict = Verdict(VerdictKind.SCORED, float(len(sample.response_tokens)))
            else:
                verdict = no_reward("failed") if failed else return_of(sample)
            assert verdict is not None
            self._deliver(sample.sample_id, verdict)

    def flush_groups(self, prompts: Collection[int]) -> None:
        pass

    def check(self) -> None:
        pass


LIMITS = Limits(max_turns=8, max_context=200, max_tokens=200, max_turn_tokens=4, max_bad_calls=1)
RULES = EpisodeRules("table", DigitRenderer(), LIMITS, retries=2, format="json", tools={})


def table_episodes(
    environments: Environments, *, max_environments: int | None = None, **rules: Any
) -> dict[str, Any]:
    """Return the RolloutThread's episode arguments: RULES with changes."""
    changed = dataclasses.replace(RULES, **rules)
    return {"environments": environments, "rules_of": lambda _: changed, "max_environments": max_environments}
