"""Real engines in their own processes, behind sockets: pauses, losses, strangers, and what is reported."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import PeerLost, RolloutError
from mrl.processes.framing import frame
from mrl.rollout import engine_messages, engine_server
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.engine_client import EngineClient, EngineLost
from mrl.rollout.engine_pool import EnginePool, PauseTotals
from mrl.rollout.engine_process import EngineProcess
from mrl.rollout.request import Completion, GenerationRequest, Sampling
from mrl.samples import Prompt
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.mrl.rollout.pools import SECRET, SEED, PoolHost, comes_true

pytestmark = pytest.mark.integration
NUMBERS = itertools.count()


class World(PoolHost):
    """Three engines whose weights stay the same, whatever their version."""

    def __init__(self, folder: Path) -> None:
        config = RolloutSection(dtype="float32", enforce_eager=True, max_num_seqs=16, kv_cache_bytes=64 << 20)

        def start(number: int) -> EngineHost:
            return EngineHost(
                secret=SECRET,
                rollout=config,
                model_path=str(folder),
                max_length=160,
                seed=SEED,
                part=EngineProcess(number),
                real_weights=True,
            )

        with ThreadPoolExecutor(3) as threads:
            hosts = list(threads.map(start, range(3)))
        for host in hosts:
            host.call(pulse_often)
        super().__init__(hosts, by_index=False)
        self.version = 0

    def set_version(self) -> None:
        self.version += 1
        for host in self.hosts:
            if host.process.is_alive():
                host.call(become_visible, self.version)

    def close(self) -> None:
        super().close()
        for host in self.hosts:
            host.close()


def pulse_often(engine: RolloutEngine) -> None:
    engine_server.PULSE_SECONDS = 0.2


def become_visible(engine: RolloutEngine, version: int) -> None:
    engine._become_visible(version)


def num_requests(engine: RolloutEngine) -> tuple[int, int]:
    """Return the number of requests that the engine has, and that vLLM has."""
    return len(engine._open), engine._engine.get_num_unfinished_requests()


def break_down(engine: RolloutEngine) -> None:
    def step() -> Any:
        raise PeerLost("engine 0 could not go on")

    engine._engine.step = step


@pytest.fixture(scope="module")
def world(tiny_model: Path) -> Iterator[World]:
    made = World(tiny_model)
    yield made
    made.close()


def asked(
    count: int, *, num_samples: int = 2, most: int = 80, validation: bool = False
) -> list[GenerationRequest]:
    rng = np.random.default_rng(7)
    sampling = Sampling(num_samples, 1.0, most, SEED, lengths=lambda prompt, n: most - (7 * prompt + n) % 12)
    numbers = [-1 - next(NUMBERS) if validation else next(NUMBERS) for _ in range(count)]
    return sampling.requests(
        [Prompt(n, rng.integers(2, 131, 12).astype(np.int32), "", None) for n in numbers]
    )


async def begun(pool: EnginePool, requests: list[GenerationRequest]) -> dict[str, tuple[str, Completion]]:
    """Return (engine, partial response) per request, once each engine has one of ten tokens; paused."""
    while True:
        await pool.pause(snapshot=True)
        names = [r.request_id for r in requests]
        parts = {n: (pool.where(n), part) for n in names if (part := pool.so_far(n)) is not None}
        far = {where for where, part in parts.values() if len(part.tokens) >= 10}
        if len(far) == len(pool._clients):
            return parts
        pool.resume()
        await asyncio.sleep(0.1)


def test_tokens_over_random_pauses_and_versions_are_those_of_the_model(
    world: World, tiny_model: Path
) -> None:
    """96 requests over three engines; each snapshot is the beginning of the response."""
    pool, requests, rng = world.pool, asked(48), random.Random(3)
    snapshots: list[Completion] = []

    async def pauses() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.0, 0.15))
            taken = rng.random() < 0.6
            interrupted = await pool.pause(snapshot=taken)
            assert interrupted.num_requests <= 48 and interrupted.num_tokens <= 48 * 92
            if taken:
                open_now = (pool.so_far(r.request_id) for r in requests)
                snapshots.extend(part for part in open_now if part is not None)
            world.set_version()
            pool.resume()

    async def main() -> list[Completion]:
        pool.newest_version = -1
        async with world.generating(requests) as tasks:
            pausing = asyncio.ensure_future(pauses())
            completions = await asyncio.gather(*tasks)
            pausing.cancel()
            await asyncio.gather(pausing, return_exceptions=True)
            return completions

    completions = world.run(main())
    by_id = {c.request_id: c for c in completions}
    assert snapshots and max(len(c.segments) for c in completions) > 2
    assert {s.engine for c in completions for s in c.segments} == {0, 1, 2}
    assert pool.newest_version == max(c.segments[-1].version for c in completions) <= world.version
    for part in snapshots:
        complete = by_id[part.request_id]
        assert part.tokens.tolist() == complete.tokens[: len(part.tokens)].tolist()
        assert part.policy_versions.tolist() == complete.policy_versions[: len(part.tokens)].tolist()
    assert driving.worst_gap(tiny_model, requests[::8], completions[::8]) < 1e-4
    assert not world.lost and not pool.is_stranded


def test_while_training_is_held_a_validation_runs_and_nobody_is_late(world: World) -> None:
    """An engine is not late in a pause or a validation, as it may not work then."""
    pool, training, validation = world.pool, asked(6), asked(2, validation=True)

    async def lengths() -> list[int]:
        await pool.pause(snapshot=True)
        parts = [pool.so_far(r.request_id) for r in training]
        return [len(part.tokens) if part is not None else 0 for part in parts]

    async def main() -> None:
        pool.resume()
        async with world.generating(training):
            before = await lengths()
            await asyncio.sleep(2.5)
            assert pool.late(2.0) == []
            pool.resume(training=False)
            async with world.generating(validation) as tasks:
                await asyncio.gather(*tasks)
            await asyncio.sleep(2.5)
            assert pool.late(2.0) == []
            assert await lengths() == before
            pool.resume()

    world.run(main())


def test_a_request_that_is_cancelled_leaves_its_engine(world: World) -> None:
    """One that runs, and one that is not sent yet; their names are free again."""
    pool, requests = world.pool, asked(2)

    async def main() -> None:
        pool.resume()
        async with world.generating(requests[:1]) as kept:
            tasks = [asyncio.ensure_future(pool.generate(r)) for r in requests[1:3]]
            unsent = asyncio.ensure_future(pool.generate(requests[3]))
            await asyncio.sleep(0)
            unsent.cancel()
            await comes_true(lambda: any(host.call(num_requests)[1] for host in world.hosts))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, unsent, return_exceptions=True)
            assert all(task.cancelled() for task in (*tasks, unsent))
            await asyncio.gather(*kept)
        await comes_true(lambda: all(host.call(num_requests) == (0, 0) for host in world.hosts))
        async with world.generating(requests[1:]):
            pass

    world.run(main())


def test_an_engine_whose_client_leaves_forgets_its_requests_and_takes_another(world: World) -> None:
    """It is idle until a client resumes it; others generate what it had."""
    pool, host = world.pool, world.hosts[2]
    address = host.address
    assert address is not None

    async def main() -> list[Completion]:
        pool.resume()
        async with world.generating(asked(6)):
            await comes_true(lambda: host.call(num_requests)[1] > 0)
            pool.give_up(2, "it left")
            await comes_true(lambda: host.call(num_requests) == (0, 0))
        while 2 not in pool._clients:  # refused until it has forgotten all
            await pool.connect(2, address)
            await asyncio.sleep(0.2)
        late = asyncio.ensure_future(pool.generate(asked(1)[0]))
        pool.resume()
        async with world.generating(asked(6)) as tasks:
            return [await late, *await asyncio.gather(*tasks)]

    completions = world.run(main())
    assert {s.engine for c in completions for s in c.segments} == {0, 1, 2}
    assert all(number == 2 for number, _, _ in world.lost)
    world.lost.clear()


def heard(address: tuple[str, int], answer: bytes) -> tuple[Any, bytes]:
    """Return the first message that an engine sends to a stranger, and all that follows the answer."""
    with socket.create_connection(address, timeout=60) as stranger, stranger.makefile("rb") as stream:
        size = int.from_bytes(stream.read(4), "little")
        challenge = engine_messages.decode(stream.read(size))
        stranger.sendall(answer)
        remaining = b""
        with contextlib.suppress(ConnectionResetError):
            remaining = stream.read()
    return challenge, remaining


def test_strangers_get_nothing_and_the_engine_goes_on(world: World) -> None:
    address = world.hosts[0].address
    assert address is not None
    nonces = set()
    for answer in (
        frame(engine_messages.encode(engine_messages.Proof(engine_messages.proof_of(b"guessed", bytes(32))))),
        frame(engine_messages.encode(engine_messages.Resume(True))) * 20,
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: somebody\r\n\r\n",
        b"\xff" * 4000,
    ):
        challenge, remaining = heard(address, answer)
        assert isinstance(challenge, engine_messages.Challenge) and remaining == b""
        nonces.add(challenge.nonce)
    assert len(nonces) == 4, "a proof is good for one connection"

    async def main() -> None:
        for secret in (b"guessed", SECRET):  # one driver is connected already
            lost: list[str] = []
            client = EngineClient("engine 0", on_lost=lost.append)
            await client.connect(address, secret)
            with pytest.raises(EngineLost):
                await client.submit(asked(1)[0])
            assert lost == [client.lost]
        world.pool.resume()
        async with world.generating(asked(4)):
            pass

    with socket.create_connection(address):  # says nothing
        world.run(main())
    assert not world.lost


def test_what_a_killed_engine_had_is_generated_elsewhere_from_the_snapshot(world: World) -> None:
    pool, requests = world.pool, asked(12, most=100)

    async def main() -> None:
        pool.resume()
        async with world.generating(requests) as tasks:
            parts = await begun(pool, requests)
            there = {name: part for name, (where, part) in parts.items() if where == "on engine 2"}
            open_there = [r.request_id for r in requests if pool.where(r.request_id) == "on engine 2"]
            before = pool.num_started_over
            world.set_version()
            pool.resume()
            os.kill(world.hosts[2].process.pid, signal.SIGKILL)
            completions = {c.request_id: c for c in await asyncio.gather(*tasks)}
        (loss,) = world.lost
        assert loss[0] == 2 and loss[1].startswith("engine 2") and "connection" in loss[1] and loss[2] == ""
        finished = [name for name in open_there if completions[name].segments[-1].engine == 2]
        assert pool.num_started_over - before == len(open_there) - len(finished) > 0
        for name, part in there.items():
            complete = completions[name]
            assert complete.tokens[: len(part.tokens)].tolist() == part.tokens.tolist()
            assert complete.segments[: len(part.segments)] == part.segments
            engines = [s.engine for s in complete.segments]
            assert name in finished or 2 not in engines[len(part.segments) :]

    world.run(main())


def test_an_engine_that_makes_no_step_is_named_and_can_be_given_up(world: World) -> None:
    pool, requests = world.pool, asked(12, most=100)

    async def main() -> None:
        pool.resume()
        before = len(world.lost)
        async with world.generating(requests):
            os.kill(world.hosts[1].process.pid, signal.SIGSTOP)
            try:
                await comes_true(lambda: bool(pool.late(3.0)))
                assert pool.late(3.0) == [1]
                pool.give_up(1, "engine 1 made no step")
                assert world.lost[before:] == [(1, "engine 1 made no step", "")]
                pool.give_up(1, "again")
                assert len(world.lost) == before + 1
            finally:
                os.kill(world.hosts[1].process.pid, signal.SIGCONT)

    world.run(main())


def test_an_engine_that_fails_says_how_and_requests_wait_for_another(world: World) -> None:
    """The last test of these engines."""
    pool, requests = world.pool, asked(4)

    async def main() -> None:
        pool.resume()
        for number in (1, 2):
            pool.give_up(number, "no longer needed")
        tasks = [asyncio.ensure_future(pool.generate(request)) for request in requests]
        world.hosts[0].call(break_down)
        await comes_true(lambda: pool.is_stranded)
        assert world.lost[-1] == (0, "engine 0 failed: PeerLost: engine 0 could not go on", "PeerLost")
        assert {pool.where(r.request_id) for r in requests} == {"in no engine"}
        assert await pool.pause(snapshot=True) == PauseTotals()
        for task in tasks:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not pool.is_stranded

    world.run(main())
    with pytest.raises(RolloutError, match="the engine failed before: PeerLost: engine 0 could not go on"):
        world.hosts[0].call(num_requests)
