"""A pool of engines in their own processes, and whole requests through it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.request import Completion, GenerationRequest, sample_of_completion
from mrl.samples import Prompt, Status
from tests.engines import EngineHost, spelled

SECRET, SEED, SECONDS = b"the run's secret", 1, 120.0


class PoolHost:
    def __init__(self, hosts: Sequence[EngineHost], *, by_index: bool) -> None:
        self.hosts, self.lost = hosts, list[tuple[int, str, str]]()
        self._runner = asyncio.Runner()
        names = [f"engine {number}" for number in range(len(hosts))]
        self.pool = EnginePool(
            names,
            secret=SECRET,
            run_seed=SEED,
            by_index=by_index,
            on_lost=lambda *loss: self.lost.append(loss),
        )
        self.run(self._connect())

    async def _connect(self) -> None:
        for number, host in enumerate(self.hosts):
            assert host.address is not None
            await self.pool.connect(number, host.address)

    def run[R](self, work: Coroutine[Any, Any, R]) -> R:
        async def bounded() -> R:
            async with asyncio.timeout(SECONDS):
                return await work

        return self._runner.run(bounded())

    @asynccontextmanager
    async def generating(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[asyncio.Task[Completion]]]:
        """Start the requests and wait until all are complete."""
        tasks = [asyncio.ensure_future(self.pool.generate(request)) for request in requests]
        await asyncio.sleep(0)
        try:
            yield tasks
            for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
                require_whole(request, completion)
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        self.pool.close()
        self.run(asyncio.sleep(0))
        self._runner.close()


def require_whole(request: GenerationRequest, completion: Completion) -> None:
    """Check length, gapless segments, ordered versions and attempts, and the text of all tokens."""
    assert (completion.status, len(completion.tokens)) == (Status.TRUNCATED, request.max_tokens)
    sample = sample_of_completion(Prompt(0, request.prompt_tokens, "", None), 0, completion)
    bounds = [0, *(s.end for s in sample.segments)]
    assert [s.start for s in sample.segments] == bounds[:-1] and bounds[-1] == request.max_tokens
    versions, attempts = ([getattr(s, name) for s in sample.segments] for name in ("version", "attempt"))
    assert versions == sorted(versions) and attempts == sorted(set(attempts))
    assert completion.text == spelled([completion.tokens])[0]


async def comes_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS / 2
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)
