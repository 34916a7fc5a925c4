"""Random worlds of rollout workers that are killed while their engines run, with delayed messages.
The driver's end, workers, pools, buffer and ledger are those of production."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from mrl.rollout.engine_client import Address
from mrl.rollout.engine_pool import EnginePool
from mrl.trajectories.group import GroupMaker, RolloutRunner
from mrl.trajectories.remote_rollouts import RemoteRollouts, RemoteWorker, WorkerEngines
from mrl.trajectories.rollout_worker import RolloutWorker
from mrl.trajectories.worker_messages import GroupStart, decode_worker_message, encode_worker_message
from tests.mrl.loops.async_worlds import World, WorldEngine

LATE = 0.3
"""Longest virtual time of a message."""


class OwnPool(EnginePool):
    def __init__(self, world: WorkerWorld, on_lost: Callable[[int, str, str], None]) -> None:
        names = [f"engine {n}" for n in range(world.num_engines)]
        super().__init__(names, secret=b"", run_seed=0, by_index=False, on_lost=on_lost)
        self.world = world

    async def connect(self, number: int, address: Address) -> None:
        await asyncio.sleep(self.world.dice.uniform(0, LATE))
        engine: Any = WorldEngine(self.world, functools.partial(self._died, number))
        self.world.engines[number] = self._clients[number] = engine
        self._router.add(number)
        self._serves.set()

    def _died(self, number: int, why: str) -> None:
        self.world.engines.pop(number, None)
        if (client := self._clients.get(number)) is not None:
            self._lost(number, client, why)


class WorldLink(RemoteWorker):
    process: Process

    async def connect(self, address: Address, secret: bytes, on_lost: Callable[[str], None]) -> None:
        self.process = self.world.processes.live[self.number]
        self._stream: Any = self.process
        self._reading: Any = self.process
        self.num_quiet, self.is_closed = 0, False
        self.process.connected(self, on_lost)

    @property
    def world(self) -> WorkerWorld:
        return WorkerWorld.now

    def send(self, message: Any) -> None:
        self.process.later(self.process.inbound, message, self.process.worker.heard)

    def hear(self, message: Any) -> None:
        self.num_quiet = 0
        self._heard(self, message)


class Process:
    def __init__(self, world: WorkerWorld, number: int, rewards: Any) -> None:
        self._world, self.number, self.is_dead = world, number, False
        self.inbound, self.outbound, self.begun = [0.0], [0.0], [0.0]
        """Virtual time of the last message each way."""
        self._link: WorldLink | None = None
        self.pool = OwnPool(world, lambda *lost: self.worker.engine_gone(*lost))
        self.worker = RolloutWorker(RolloutRunner(self.pool, rewards, run_seed=0), self.pool, self._send)

    def connected(self, link: WorldLink, on_lost: Callable[[str], None]) -> None:
        self._link, self._on_lost = link, on_lost
        self.worker.report()

    def later(self, way: list[float], message: Any, take: Callable[[Any], None]) -> None:
        """Deliver a message after earlier ones, unless a process dies first."""
        loop = asyncio.get_running_loop()
        way[0] = max(way[0], loop.time() + self._world.dice.uniform(0, LATE))
        data = message if isinstance(message, list) else encode_worker_message(message)

        def deliver() -> None:
            if not self.is_dead:
                take(data if isinstance(data, list) else decode_worker_message(data))

        loop.call_at(way[0], deliver)

    def _send(self, message: Any) -> None:
        if self._link is not None:
            self.later(self.outbound, message, self._link.hear)

    def kill(self) -> None:
        """Kill the process; its engines and the driver learn of it later."""
        if self.is_dead or self._link is None:
            return
        self.is_dead, loop, dice = True, asyncio.get_running_loop(), self._world.dice
        self._world.num_killed += 1
        for group in self.worker._open.values():
            group.task.cancel()
        for task in self.worker._tasks:
            task.cancel()
        self.let_go = asyncio.ensure_future(self._let_go(list(self.pool._clients.values())))
        loop.call_later(dice.uniform(0, LATE), lambda: self._on_lost("killed"))

    async def _let_go(self, engines: Sequence[Any]) -> None:
        await asyncio.sleep(self._world.dice.uniform(0, 20 * LATE))
        for engine in engines:
            engine.paused, engine._open, engine._drawn = True, {}, {}

    def close(self) -> None:
        """As a link's writer."""

    def cancel(self) -> None:
        """As a link's reading task."""


class Processes:
    secret = b""

    def __init__(self, world: WorkerWorld, count: int, rewards: Callable[[], Any]) -> None:
        self.names = [f"worker {n}" for n in range(count)]
        self.engines = [range(n, world.num_engines, count) for n in range(count)]
        self._world, self._rewards = world, rewards
        self.live: dict[int, Process] = {}

    async def start_worker(self, number: int) -> Address:
        await asyncio.sleep(self._world.dice.uniform(0, 5))
        self.live[number] = Process(self._world, number, self._rewards())
        return "", 0

    async def begin(self, number: int, groups: Sequence[GroupStart]) -> None:
        process = self.live[number]
        process.later(process.begun, list(groups), process.worker.begin)

    async def drop(self, number: int, groups: Sequence[int]) -> None:
        process = self.live[number]
        process.later(process.begun, list(groups), process.worker.drop)

    async def end_worker(self, number: int, why: str) -> None:
        await self.live[number].let_go


class Driven(RemoteRollouts):
    worker_class = WorldLink


@dataclasses.dataclass
class WorkerWorld(World):
    now: ClassVar[WorkerWorld]
    rollouts: type[RemoteRollouts] = Driven
    kills_workers: bool = True
    num_killed: int = 0

    def _made(
        self, engines: int, rewards: Callable[[], Any], failed: Callable[[BaseException], None]
    ) -> tuple[Any, GroupMaker]:
        WorkerWorld.now, self.num_engines = self, engines
        self.engines: dict[int, WorldEngine] = {}
        self._lost: set[int] = set(range(engines))
        self.processes = Processes(self, self.dice.randint(1, engines), rewards)
        rollouts = self.rollouts(
            self.processes,
            by_index=self.dice.random() < 0.5,
            silent_seconds=60.0,
            on_failure=failed,
            on_engine_lost=lambda number, why, kind: self._lost.add(number),
        )
        return rollouts.engines, rollouts

    async def _serve(self, pool: WorkerEngines, version: int) -> None:
        while self._lost:
            await pool.connect(self._lost.pop(), ("", 0))
        self.served = version
        for engine in self.engines.values():
            assert engine.paused, "weights changed under a running engine"
            engine.version = version

    async def _kill(self, pool: WorkerEngines, rate: float) -> None:
        while True:
            await asyncio.sleep(self.dice.expovariate(rate) if rate else 1e9)
            if self.kills_workers and self.dice.random() < 0.5:
                self.dice.choice(list(self.processes.live.values())).kill()
            elif len(self.engines) > 1:
                number = self.dice.choice(sorted(self.engines))
                process = next(
                    p for p in self.processes.live.values() if number in self.processes.engines[p.number]
                )
                if number in process.pool._clients and not process.is_dead:
                    process.pool._clients[number].give_up("killed")
