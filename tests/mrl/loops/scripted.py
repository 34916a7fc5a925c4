"""A supply whose engines and reward workers follow a script."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np

from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.loops.group_supply import GroupSupply
from mrl.loops.rollout_thread import RolloutThread
from mrl.observe.phases import PhaseClock
from mrl.rollout.engine_pool import Engines, PauseTotals
from mrl.rollout.request import Completion, GenerationRequest, Sampling
from mrl.rollout.seeds import sample_of
from mrl.routes import Routes
from mrl.samples import Prompt, Sample, Verdict
from tests.mrl.loops.table_policy import config_of, thread_over
from tests.support.samples import make_completion, verdict_of

Reward = Callable[[int, int], float | None]


def mixed(prompt: int, sample: int) -> float:
    """Reward half of every group's samples."""
    return float(sample % 2)


def useful(*prompts: int) -> Reward:
    """Give only these prompts' groups differing rewards; all other samples are correct."""
    return lambda prompt, sample: float(sample % 2) if prompt in prompts else 1.0


class ScriptedEngines(Engines):
    """Answers a request at once with two tokens."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []
        self.version, self.newest_version = 0, -1
        self.answers: Callable[[GenerationRequest], bool] = lambda request: True
        """Returns True for requests that are answered."""
        self.error: Exception | None = None
        self.routes: Routes | None = None
        """Routes of every completion."""

    async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        if not self.answers(request):
            await asyncio.Event().wait()
        completion = make_completion(request, [1, 2], version=self.version, text="text")
        return dataclasses.replace(completion, routes=self.routes)

    async def pause(self, *, snapshot: bool) -> PauseTotals:
        return PauseTotals()

    def resume(self, *, training: bool = True) -> None: ...

    def so_far(self, request_id: str) -> Completion | None:
        return None

    def where(self, request_id: str) -> str:
        return "on the script"

    @property
    def is_stranded(self) -> bool:
        return False


class ScriptedRewards:
    def __init__(self, reward: Reward) -> None:
        self.reward, self.flushed = reward, set[int]()
        self.answers: Callable[[str], bool] = lambda sample_id: True

    def deliver_to(self, deliver: Callable[[str, Verdict], None]) -> None:
        self._deliver = deliver

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        for sample, _ in reversed(list(pairs)):
            if self.answers(sample.sample_id):
                value = self.reward(sample.prompt_index, sample.sample_index)
                self._deliver(sample.sample_id, verdict_of(value))

    def flush_groups(self, prompts: Collection[int]) -> None:
        self.flushed |= set(prompts)

    def check(self) -> None: ...


class Scripted:
    def __init__(
        self, folder: Path, algorithm: dict[str, object], *words: str, reward: Reward = mixed
    ) -> None:
        self.config: Config = config_of(folder, algorithm, *words)
        self.sampling = Sampling.of(self.config)
        self.engines, self.rewards = ScriptedEngines(), ScriptedRewards(reward)
        self.clock = PhaseClock()
        self.rollouts = self.thread(deadline_seconds=60.0)
        prompts = [Prompt(n, np.array([n], np.int32), "", None) for n in range(40)]
        self.supply = GroupSupply(self.config, PromptStream(prompts, seed=1), self.sampling)

    def thread(self, *, deadline_seconds: float) -> RolloutThread:
        return thread_over(self.engines, self.rewards, self.clock, deadline_seconds=deadline_seconds)

    def asked(self) -> list[list[int]]:
        """Return the prompt indices of each round so far; samples of a prompt are requested together."""
        rounds: list[list[int]] = []
        for index in dict.fromkeys(sample_of(request.request_id)[0] for request in self.engines.asked):
            size = self.config.loop.prompts_per_step
            if not rounds or len(rounds[-1]) == size:
                rounds.append([])
            rounds[-1].append(index)
        return rounds

    def step(self, version: int = 0) -> tuple[list[int], dict[str, float]]:
        """Return (prompt indices, metrics) of the next step's groups, with new samples of this version."""
        self.engines.version = version
        supplied = self.supply.take(self.rollouts, version=version)
        return [group.prompt.index for group in supplied.groups], supplied.metrics
