"""Rollout workers over real sockets, with engines whose tokens follow from a request's seed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.driver_stubs import Pace, StubEngine
from mrl.errors import RewardError, WorkerLost
from mrl.loops.rollout_thread import RolloutThread, in_this_process
from mrl.loops.worker_thread import WorkerThread
from mrl.observe.phases import PhaseClock
from mrl.processes.framing import frame
from mrl.rollout import engine_messages
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.engine_client import Address
from mrl.rollout.engine_loop import EngineLoop
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engine_process import EngineProcess
from mrl.rollout.engine_server import EngineServer
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample
from mrl.trajectories import worker_messages
from mrl.trajectories.remote_rollouts import RemoteRollouts
from mrl.trajectories.worker_messages import GroupStart
from tests.support.samples import verdict_of

SECRET, NAMES, SECONDS = b"the run's secret", ["engine 0", "engine 1", "engine 2"], 60.0
SHARES = [(0, 2), (1,)]
PROMPTS = [Prompt(n, np.arange(3, 5 + n, dtype=np.int32), "", {n}) for n in range(9)]
"""Their ground truth is not a JSON value."""
SAMPLING = Sampling(4, 1.0, 40, 0, lengths=lambda prompt, sample: 1 + (7 * prompt + sample) % 30)


class Even:
    """Reward workers: 1 for an even sample, unless `fails` or `waits`."""

    fails = waits = False

    def deliver_to(self, deliver: Any) -> None:
        self._deliver = deliver

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        if self.fails:
            raise RewardError("the verifier broke")
        for sample, prompt in pairs:
            assert prompt.ground_truth == {prompt.index}
            if not self.waits:
                self._deliver(sample.sample_id, verdict_of(float(sample.sample_index % 2 == 0)))

    def flush_groups(self, prompts: Collection[int]) -> None: ...

    def check(self) -> None: ...


class Engines:
    def __init__(self, token_seconds: float) -> None:
        self.servers = [self._serve(n, token_seconds) for n in range(len(NAMES))]

    def _serve(self, number: int, token_seconds: float) -> tuple[EngineServer, EngineLoop, Address]:
        listener = socket.create_server(("127.0.0.1", 0))
        stub = StubEngine(Pace(token_seconds, 0.0, 100), EngineProcess(number), seats=8, seed=0)
        stub.version = 0
        stub._tokens, stub._logprobs = TOKENS, -TOKENS.astype(np.float32)
        server = EngineServer(listener, SECRET, lambda arrays: [str(len(tokens)) for tokens in arrays])
        loop = EngineLoop(lambda: cast(RolloutEngine, stub), server)
        loop.start()
        loop.ready.result()
        server.serve(loop)
        return server, loop, listener.getsockname()

    def connect(self, thread: RolloutThread) -> None:
        for number, (_, _, address) in enumerate(self.servers):
            thread.connect(number, address)

    def close(self) -> None:
        for _, loop, _ in self.servers:
            loop.close()


TOKENS = np.random.default_rng(0).integers(0, 100, 1 << 20).astype(np.int32)
"""Shared by all engines: a response does not depend on its engine."""


class Workers:
    secret, engines = SECRET, SHARES
    names = [f"rollout worker of node {n}" for n in range(len(SHARES))]

    def __init__(self, engines: Engines, *, most: int = 3) -> None:
        self._engines, self._most = engines, most
        self.rewards = [Even() for _ in SHARES]
        self.threads: dict[int, WorkerThread] = {}
        self._lock = threading.Lock()
        self.lost: list[tuple[int, str]] = []
        self.begun: list[tuple[int, int]] = []
        """(worker, prompt) of each started group."""

    async def start_worker(self, number: int) -> Address:
        listener = socket.create_server(("127.0.0.1", 0))
        self.rewards[number].waits = self.rewards[number].waits and not self.lost
        options: dict[str, Any] = {"run_seed": 0, "by_index": True}
        made = await asyncio.to_thread(WorkerThread, listener, SECRET, NAMES, self.rewards[number], **options)
        self.threads[number] = made
        return listener.getsockname()

    async def begin(self, number: int, groups: Sequence[GroupStart]) -> None:
        self.begun += [(number, start.prompt.index) for start in groups]
        self.threads[number].begin(groups)

    async def drop(self, number: int, groups: Sequence[int]) -> None:
        self.threads[number].drop(groups)

    async def end_worker(self, number: int, why: str) -> None:
        self.lost.append((number, why))
        if len(self.lost) > self._most:
            raise WorkerLost(why)
        await asyncio.to_thread(self.kill, number)
        for engine in SHARES[number]:
            await asyncio.to_thread(self._engines.servers[engine][0].wait_until_free, SECONDS)

    def kill(self, number: int) -> None:
        thread = self.threads[number]

        def cut() -> None:
            if thread._writer is not None:
                thread._writer.transport.abort()
            for client in list(thread._worker._engines._clients.values()):
                client._stream._transport.abort()

        with self._lock:
            if thread._thread.is_alive():
                thread.ask(cut)
                thread.close()


@contextlib.contextmanager
def remote(
    *, token_seconds: float = 0.0, by_index: bool = True, silent_seconds: float = SECONDS, most: int = 3
) -> Iterator[tuple[RolloutThread, Workers]]:
    engines = Engines(token_seconds)
    workers = Workers(engines, most=most)

    def make(thread: RolloutThread) -> RemoteRollouts:
        return RemoteRollouts(
            workers,
            by_index=by_index,
            silent_seconds=silent_seconds,
            on_failure=thread.fail,
            on_engine_lost=thread.note_lost,
        )

    with contextlib.closing(RolloutThread(make, PhaseClock(), deadline_seconds=SECONDS)) as thread:
        engines.connect(thread)
        thread.resume()
        yield thread, workers
    for worker in workers.threads.values():
        worker.close()
    engines.close()


def local() -> list[Group]:
    engines = Engines(0.0)

    def pool(thread: RolloutThread) -> EnginePool:
        return EnginePool(NAMES, secret=SECRET, run_seed=0, by_index=True, on_lost=thread.note_lost)

    make = in_this_process(pool, Even(), run_seed=0)
    with contextlib.closing(RolloutThread(make, PhaseClock(), deadline_seconds=SECONDS)) as thread:
        engines.connect(thread)
        thread.resume()
        groups = thread.groups(PROMPTS, SAMPLING)
    engines.close()
    return groups


def told(groups: Iterable[Group], *, with_engines: bool = False) -> list[Any]:
    """Return what must not depend on the worker; the engines only if none was lost."""
    rows = []
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.verdict is not None
        segments = [dataclasses.replace(s, engine=s.engine * with_engines) for s in sample.segments]
        values = sample.response_tokens.tolist(), sample.rollout_logprobs.tolist(), sample.verdict.value
        rows.append((sample.sample_id, values, segments, sample.response_text))
    return rows


def come_true(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def test_groups_are_those_of_the_driver_and_come_from_the_engines_that_it_would_ask() -> None:
    with remote() as (thread, workers):
        groups = thread.groups(PROMPTS, SAMPLING)
        assert thread.engines.newest_version == 0
    assert told(groups, with_engines=True) == told(local(), with_engines=True)
    assert [group.prompt for group in groups] == PROMPTS
    assert {s.engine for group in groups for s in group.samples[0].segments} == {0, 1, 2}
    assert sorted(workers.begun) == sorted((int(n % 3 == 1), n) for n in range(9))


def test_without_order_a_group_goes_to_the_worker_with_most_room_for_each_engine() -> None:
    with remote(by_index=False) as (thread, workers):
        thread.groups(PROMPTS, SAMPLING)
    assert [sum(number == n for number, _ in workers.begun) for n in (0, 1)] == [6, 3]


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_lost_workers_groups_are_begun_elsewhere_and_come_once(how: str) -> None:
    with remote(token_seconds=0.01, silent_seconds=2.0 if how == "silent" else SECONDS) as (thread, workers):
        opened = thread.ask(lambda: thread._rollouts.start_all(PROMPTS, SAMPLING, on_failure=thread.fail))
        come_true(lambda: len(workers.begun) == 9)
        if how == "killed":
            workers.kill(0)
        else:
            workers.threads[0]._worker._send = lambda message: None
        groups = thread.do(_all(opened), SECONDS)
        come_true(lambda: len(thread.engines.serving) == 3)  # type: ignore[attr-defined]
        again = thread.groups(PROMPTS[:3], SAMPLING)
    assert told(groups) == told(local()) and told(again) == told(groups)[:12]
    ((number, why),) = workers.lost
    expected = (
        "closed its connection"
        if how == "killed"
        else "sent nothing within rollout.step_deadline_seconds = 2 s"
    )
    assert number == 0 and why == f"rollout worker of node 0 {expected}"
    assert len(workers.begun) > 12


async def _all(opened: Sequence[Any]) -> list[Group]:
    return [await group.task for group in opened]


def test_too_many_losses_end_the_run_with_the_cause() -> None:
    with remote(token_seconds=0.01, most=0) as (thread, workers):
        thread.ask(lambda: thread._rollouts.start_all(PROMPTS, SAMPLING, on_failure=thread.fail))
        come_true(lambda: len(workers.begun) == 9)
        workers.kill(1)
        with pytest.raises(WorkerLost, match=r"^rollout worker of node 1 closed its connection$"):
            thread.do(asyncio.sleep(SECONDS))


def test_what_fails_in_a_worker_ends_the_run_by_its_name() -> None:
    with remote() as (thread, workers):
        workers.rewards[1].fails = True
        with pytest.raises(RewardError, match=r"^rollout worker of node 1: the verifier broke$"):
            thread.groups(PROMPTS, SAMPLING)


def test_what_a_late_group_lacks_is_named_with_its_worker() -> None:
    with remote() as (thread, workers):
        workers.rewards[1].waits = True
        rollouts = thread._rollouts
        (group,) = thread.ask(lambda: rollouts.start_all(PROMPTS[1:2], SAMPLING, on_failure=thread.fail))
        come_true(lambda: group.num_incomplete == 0)
        assert group.num_unjudged == 4 and group.completed.is_set()
        assert thread.ask(lambda: rollouts.late(group)) == (
            "0 responses missing, 4 verdicts missing (first: 1.0; 1.1; 1.2)"
        )


def test_strangers_get_nothing_of_a_worker() -> None:
    with remote() as (thread, workers):
        address = workers.threads[0]._server.sockets[0].getsockname()
        for message in (
            frame(engine_messages.encode(engine_messages.Proof(bytes(32)))),
            frame(worker_messages.encode_worker_message(worker_messages.ResumeRollouts(True))) * 20,
        ):
            with (
                socket.create_connection(address, timeout=SECONDS) as stranger,
                stranger.makefile("rb") as stream,
            ):
                challenge = engine_messages.decode(stream.read(int.from_bytes(stream.read(4), "little")))
                assert isinstance(challenge, engine_messages.Challenge)
                stranger.sendall(message)
                with contextlib.suppress(ConnectionResetError):
                    assert stream.read() == b""
        assert told(thread.groups(PROMPTS, SAMPLING)) == told(local())
