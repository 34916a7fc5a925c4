"""Random worlds around the production buffer, pool, ledger and rollouts, in virtual time, from a seed.
Engines pause, take weights, die and come back; verdicts are late; runs are cut and resumed."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import selectors
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mrl.config.root import Config
from mrl.config.sections.algorithm import FilterSection
from mrl.data.prompt_stream import PromptStream
from mrl.loops.rollout_buffer import RolloutBuffer
from mrl.pool.ledger import GroupEnd
from mrl.rollout.engine_client import EngineLost
from mrl.rollout.engine_messages import PauseDone
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.request import Completion, GenerationRequest, Sampling, join_completions, next_request
from mrl.rollout.seeds import sample_of
from mrl.samples import Group, Prompt, Sample, Status, Verdict, VerdictKind
from mrl.trajectories.group import GroupMaker, RolloutRunner
from mrl.trajectories.group_messages import decode_group
from tests.mrl.loops.table_policy import config_of
from tests.support.samples import make_completion

PROMPTS = [Prompt(n, np.array([n], np.int32), "", None) for n in range(7)]
SECONDS = 5000.0


class Deadlock(AssertionError):
    """No task can continue."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer when nothing else is ready."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [timer for timer in self._scheduled if not timer._cancelled]  # type: ignore[attr-defined]
            if not timers:
                raise Deadlock("no task can go on")
            self.now = max(self.now, min(timer._when for timer in timers))
        super()._run_once()  # type: ignore[misc]


def token(name: str, position: int, version: int) -> int:
    """Return the token that the policy of a version draws at a position."""
    return sum(map(ord, name)) * 31 + position * 7 + version * 3 & 0x3FF


def length_of(name: str) -> int:
    return 1 + (sum(n * ord(c) for n, c in enumerate(name, 3)) % 25)


class WorldEngine:
    """An engine and its client. It steps by itself; a pause keeps running requests with their tokens."""

    def __init__(self, world: World, lost: Callable[[str], None]) -> None:
        self._world, self._lost = world, lost
        self._open: dict[str, tuple[GenerationRequest, Completion | None, asyncio.Future[Completion]]] = {}
        self._drawn: dict[str, list[int]] = {}
        self.version, self.paused, self.failure = world.served, True, None
        self._task = asyncio.ensure_future(self._run())

    async def submit(self, request: GenerationRequest) -> Completion:
        assert request.request_id not in self._open, "asked twice"
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open[request.request_id] = request, None, future
        return await future

    async def pause(self, *, snapshot: bool) -> tuple[PauseDone, list[Completion]]:
        await asyncio.sleep(self._world.dice.uniform(0, 1))
        if self._task.cancelled():
            raise EngineLost("dead")
        self.paused = True
        for name, drawn in self._drawn.items():
            original, before, future = self._open[name]
            part = self._completion(self._request(original, before), drawn, Status.INTERRUPTED)
            self._open[name] = original, join_completions(before, part), future
        count = len(self._drawn)
        self._drawn = {}
        so_far = [before for _, before, _ in self._open.values() if before is not None]
        return PauseDone(count, 0, None), so_far if snapshot else []  # type: ignore[arg-type]

    def resume(self, *, training: bool = True) -> None:
        self.paused = False

    def silent_seconds(self) -> float:
        return 0.0

    def give_up(self, why: str) -> None:
        self._task.cancel()
        for *_, future in self._open.values():
            if not future.done():
                future.set_exception(EngineLost(why))
        self._open, self._drawn = {}, {}
        self._lost(why)

    def _request(self, original: GenerationRequest, before: Completion | None) -> GenerationRequest:
        return original if before is None else next_request(original, before, 0)

    def _completion(self, request: GenerationRequest, drawn: list[int], status: Status) -> Completion:
        return make_completion(request, drawn, version=self.version, status=status)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._world.dice.uniform(0.5, 1.5))
            if not self.paused:
                self._step()

    def _step(self) -> None:
        waiting = sorted((n for n in self._open if n not in self._drawn), key=sample_of)
        for name in waiting[: self._world.seats - len(self._drawn)]:
            self._drawn[name] = []
        for name, drawn in list(self._drawn.items()):
            original, before, future = self._open[name]
            request = self._request(original, before)
            position = len(request.own_tokens) + len(drawn)
            drawn.append(token(name, position, self.version))
            if position + 1 == length_of(name):
                del self._drawn[name], self._open[name]
                if not future.done():  # its caller is gone
                    future.set_result(
                        join_completions(before, self._completion(request, drawn, Status.FINISHED))
                    )


class WorldPool(EnginePool):
    def __init__(self, world: World, count: int) -> None:
        super().__init__([f"engine {n}" for n in range(count)], secret=b"", run_seed=0, by_index=False)
        self.world = world
        self.replace()

    def replace(self) -> None:
        for number in range(len(self._names)):
            if number not in self._clients:
                engine: Any = WorldEngine(self.world, functools.partial(self._died, number))
                self._clients[number] = engine
                self._router.add(number)
        self._serves.set()

    def _died(self, number: int, why: str) -> None:
        if (client := self._clients.get(number)) is not None:
            self._lost(number, client, why)


class WorldBuffer(RolloutBuffer):
    """The production buffer without its periodic checks."""

    async def _look(self) -> None: ...


class WorldRewards:
    def __init__(self, dice: random.Random, filtered: float) -> None:
        self._dice, self._filtered = dice, filtered

    def score(self, sample: Sample, prompt: Prompt) -> asyncio.Future[Verdict]:
        return asyncio.ensure_future(self._score(sample))

    async def _score(self, sample: Sample) -> Verdict:
        await asyncio.sleep(self._dice.uniform(0, 5))
        useless = random.Random(sample.prompt_index).random() < self._filtered
        return Verdict(VerdictKind.SCORED, 1.0 if useless else float(sample.sample_index % 2))

    def flush(self, prompt: int) -> None: ...


@functools.cache
def _config() -> Config:
    with tempfile.TemporaryDirectory() as folder:
        return config_of(Path(folder), {}, "loop.schedule=stream")


class Cut(Exception):
    """The run dies here."""


@dataclasses.dataclass
class World:
    seed: int
    pool: type[WorldPool] = WorldPool
    buffer: type[WorldBuffer] = WorldBuffer
    trained: dict[int, int] = dataclasses.field(default_factory=dict)
    """The version that trained each prompt."""
    num_lost: int = 0
    served: int = 0

    def run(self) -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(self._run())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    async def _run(self) -> None:
        dice = self.dice = random.Random(self.seed)
        batch, size, steps = dice.randint(1, 3), dice.randint(1, 3), dice.randint(3, 7)
        filtered = dice.choice([0.0, 0.3, 0.6]) if size > 1 else 0.0
        self.seats, engines, death = dice.randint(1, 6), dice.randint(1, 3), dice.choice([0.0, 0.0, 0.1])
        config = self._configured(batch, size, dice.randint(0, 3), dice.randint(1, 2), filtered > 0)
        saved: tuple[int, dict[str, Any], dict[int, int]] | None = None
        version = 0
        while version < steps:
            cut_at = dice.choice([None, dice.randint(version + 1, steps)])
            if saved is not None:
                version, self.trained = saved[0], dict(saved[2])
            try:
                saved = await self._start(config, version, steps, saved, cut_at, engines, death, filtered)
                return
            except Cut as cut:
                (saved,) = cut.args
                version = 0 if saved is None else saved[0]
                self.trained = {} if saved is None else self.trained

    def _configured(
        self, batch: int, size: int, max_staleness: int, sync_every: int, filters: bool
    ) -> Config:
        config = _config()
        loop = config.loop.model_copy(update={"prompts_per_step": batch, "samples_per_prompt": size})
        stream = config.stream.model_copy(update={"max_staleness": max_staleness, "sync_every": sync_every})
        section = FilterSection(min_reward_range=0.0, max_rounds=1000) if filters else None
        algorithm = config.algorithm.model_copy(update={"filter": section})
        return config.model_copy(update={"loop": loop, "stream": stream, "algorithm": algorithm})

    async def _start(
        self,
        config: Config,
        version: int,
        steps: int,
        checkpoint: Any,
        cut_at: int | None,
        engines: int,
        death: float,
        filtered: float,
    ) -> Any:
        """Start the run, from a checkpoint if there is one, and run until it ends or is cut."""
        dice, failures = self.dice, list[BaseException]()
        pool, rollouts = self._made(engines, lambda: WorldRewards(dice, filtered), failures.append)
        buffer = self.buffer(
            config,
            PromptStream(PROMPTS, seed=1),
            rollouts,
            Sampling.of(config),
            on_failure=lambda error: (failures.append(error), buffer.changed.set()),
        )
        before: dict[str, Sample] = {}
        if checkpoint is not None:
            buffer.restore(checkpoint[1], version=version)
            before = _partials(checkpoint[1])
        self.served = version
        await self._serve(pool, version)
        buffer.commit(version)
        killer = asyncio.ensure_future(self._kill(pool, death))
        pool.resume()
        buffer.resume()
        try:
            while version < steps:
                groups = await self._take(buffer, version, failures)
                self._check(groups, version, config, before)
                if dice.random() < 0.5:
                    await asyncio.sleep(dice.uniform(0, 10))  # training; engines go on
                version += 1
                if not (buffer.sync_due(shared=False) or version == steps or dice.random() < 0.3):
                    continue
                buffer.stop()
                await pool.pause(snapshot=True)
                if dice.random() < 0.5:
                    checkpoint = version, buffer.state(), dict(self.trained)
                if cut_at == version:
                    raise Cut(checkpoint)
                await self._serve(pool, version)
                buffer.commit(version)
                pool.resume()
                buffer.resume()
        finally:
            self.num_lost += pool.num_started_over
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in [killer, *tasks]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ledger = buffer._ledger
        dropped = sum(count for end, count in ledger.ends.items() if end is not GroupEnd.TRAINED)
        assert len(self.trained) + dropped + ledger.num_in_flight == ledger.next_index, (
            "a prompt was lost or ended twice"
        )
        return checkpoint

    async def _take(self, buffer: RolloutBuffer, version: int, failures: list[BaseException]) -> list[Group]:
        async with asyncio.timeout(SECONDS):
            while (taken := buffer.take(version)) is None:
                if failures:
                    raise failures[0]
                buffer.changed.clear()
                await buffer.changed.wait()
        return taken.groups

    def _made(
        self, engines: int, rewards: Callable[[], Any], failed: Callable[[BaseException], None]
    ) -> tuple[Any, GroupMaker]:
        """Return the engines as a schedule sees them, and what makes groups."""
        pool = self.pool(self, engines)
        return pool, RolloutRunner(pool, rewards(), run_seed=0)

    async def _serve(self, pool: Any, version: int) -> None:
        pool.replace()
        self.served = version
        for engine in pool._clients.values():
            assert engine.paused, "weights changed under a running engine"
            engine.version = version

    async def _kill(self, pool: Any, rate: float) -> None:
        while True:
            await asyncio.sleep(self.dice.expovariate(rate) if rate else 1e9)
            if len(pool._clients) > 1:
                self.dice.choice(list(pool._clients.values())).give_up("killed")

    def _check(self, groups: list[Group], version: int, config: Config, before: dict[str, Sample]) -> None:
        bound = config.stream.max_staleness + config.stream.sync_every - 1
        for group in groups:
            index = group.prompt.index
            assert index not in self.trained, f"prompt {index} was trained twice"
            assert not self.trained or index > max(self.trained), "out of order"
            self.trained[index] = version
            assert len(group.samples) == config.loop.samples_per_prompt
            for sample in group.samples:
                versions, name = sample.policy_versions.tolist(), sample.sample_id
                assert len(sample.response_tokens) == length_of(name), "not whole"
                assert versions == sorted(versions) and 0 <= version - versions[0] <= bound, "too old"
                expected = [token(name, position, v) for position, v in enumerate(versions)]
                assert sample.response_tokens.tolist() == expected, "tokens of another version"
                attempts = [segment.attempt for segment in sample.segments]
                assert attempts == sorted(set(attempts)), "a seed was used twice"
                if (old := before.get(name)) is not None:
                    count = len(old.response_tokens)
                    assert sample.response_tokens[:count].tolist() == old.response_tokens.tolist(), (
                        "drawn twice"
                    )
                    assert sample.segments[: len(old.segments)] == old.segments, "drawn twice"


def _partials(state: dict[str, Any]) -> dict[str, Sample]:
    groups = [
        decode_group(data, lambda index: dataclasses.replace(PROMPTS[0], index=index))
        for data in state["making"]
    ]
    return {sample.sample_id: sample for group in groups for sample in group.samples}
