"""Engines and reward workers that follow a script: who answers when, with which reward, and who dies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.loops.collect import Collector
from mrl.loops.group_supply import GroupSupply
from mrl.loops.in_flight import InFlight
from mrl.loops.protocols import Rollout
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import GenerationRequest, Response, Round
from mrl.routes import Routes
from mrl.samples import Prompt, Sample, Status, Verdict
from tests.mrl.loops.table_policy import config_of
from tests.support.samples import make_response, verdict_of

Reward = Callable[[int, int], float | None]
"""The reward of (prompt index, sample index)."""


def mixed(prompt: int, sample: int) -> float:
    """Every group has right and wrong samples."""
    return float(sample % 2)


def useful(*prompts: int) -> Reward:
    """Only these prompts' groups have right and wrong samples; all others are all right."""
    return lambda prompt, sample: float(sample % 2) if prompt in prompts else 1.0


class ScriptedRollout(Rollout):
    """Answers a few requests at each poll, the last requested first."""

    def __init__(self, *, at_once: int = 3, status: Status = Status.FINISHED) -> None:
        self.rounds: list[Round] = []
        self.version = 0
        self.dies_at: int | None = None
        """Number of the poll, from 1, that raises."""
        self.error: Exception = RuntimeError("an engine died")
        self.polls = 0
        self.silent = False
        self.routes: Routes | None = None
        """What every response brings."""
        self._at_once, self._status = at_once, status
        self._open: list[GenerationRequest] = []

    def submit(self, asked: Iterable[Round]) -> None:
        assert not self._open, "a round is handed in while another one runs"
        (requested,) = asked
        self.rounds.append(requested)
        self._open = requested.requests()

    def ended(self, timeout_seconds: float) -> list[int]:
        return [0]

    def take(self, engines: Sequence[int]) -> list[Response]:
        self.polls += 1
        if self.polls == self.dies_at:
            raise self.error
        return [] if self.silent else [self._answer() for _ in range(min(self._at_once, len(self._open)))]

    def where(self, prompt: int) -> str:
        return "the script"

    def _answer(self) -> Response:
        asked, drawn = self._open.pop(), [1, 2]
        response = make_response(asked, drawn, version=self.version, status=self._status, text="text")
        return dataclasses.replace(response, routes=self.routes)


class ScriptedRewards:
    """Gives its verdicts one at a time, the last submitted first, and all only after flush_groups()."""

    def __init__(self, reward: Reward) -> None:
        self.reward, self.silent = reward, False
        self._waiting: list[Sample] = []
        self._flushed = False

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        self._waiting += [sample for sample, _ in pairs]
        self._flushed = False

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        if self.silent or not self._waiting or (len(self._waiting) == 1 and not self._flushed):
            return []
        sample = self._waiting.pop()
        return [(sample.sample_id, verdict_of(self.reward(sample.prompt_index, sample.sample_index)))]

    def flush_groups(self, prompts: Collection[int]) -> None:
        self._flushed = True


class Scripted:
    """A supply over the script: four groups of four a step, from an endless stream in the order of its rows."""

    def __init__(
        self, folder: Path, algorithm: dict[str, object], *words: str, reward: Reward = mixed
    ) -> None:
        self.config: Config = config_of(folder, algorithm, *words)
        self.rollout, self.rewards = ScriptedRollout(), ScriptedRewards(reward)
        self.clock = PhaseClock()
        self.collector = self.collector_of(deadline_seconds=60.0)
        prompts = [Prompt(n, np.array([n], np.int32), "", None) for n in range(40)]
        self.supply = GroupSupply(self.config, PromptStream(prompts, seed=1))

    def in_flight(self) -> InFlight:
        return InFlight(self.rollout, self.rewards, self.clock, run_seed=0)

    def collector_of(self, *, deadline_seconds: float) -> Collector:
        return Collector(self.in_flight(), clock=self.clock, deadline_seconds=deadline_seconds)

    def asked(self) -> list[list[int]]:
        """The prompt indices of each round so far."""
        return [[index for index, _ in requested.prompts] for requested in self.rollout.rounds]

    def step(self, version: int = 0) -> tuple[list[int], dict[str, float]]:
        """(prompt indices, metrics) of the next step's groups, with new samples of this version."""
        self.rollout.version = version
        supplied = self.supply.take(self.collector, version=version)
        return [group.prompt.index for group in supplied.groups], supplied.metrics
