"""Environments for coroutines: open an episode's environment, get answers turn after turn, close it.

| waits for | unblocked by |
|---|---|
| a free place, if agent.max_environments are open | an episode that closes its environment |
| an answer | the environment's host, which keeps the deadlines (pool.py) |
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mrl.agents.answer import EnvironmentResult
from mrl.agents.tool_calls import ToolCall

POLL_SECONDS = 0.5
"""Longest interval between two checks of the hosts, which may have died or be silent."""
UNSENT_SECONDS = 0.002
"""That interval while a pipe is full."""


class Environments(Protocol):
    """Processes of environments (mrl/agents/pool.py), by episode key; no call here waits."""

    def open(self, key: str, environment: str, task: Mapping[str, Any], seed: int) -> None: ...

    def run(
        self, key: str, environment: str, task: Mapping[str, Any], seed: int, url: str, secret: str
    ) -> None: ...

    def step(self, key: str, text: str, calls: Sequence[ToolCall] = ()) -> None: ...

    def close(self, key: str) -> None: ...

    def poll(self, timeout_seconds: float) -> list[EnvironmentResult]: ...

    def descriptors(self) -> Iterable[int]:
        """Return the descriptors that become readable when a host sends something."""
        ...

    @property
    def has_unsent(self) -> bool: ...


class OpenEnvironment:
    """The environment of one episode."""

    def __init__(self, client: EnvironmentClient, key: str) -> None:
        self._client, self._key = client, key

    async def opening(self) -> EnvironmentResult:
        """Return what precedes the first turn."""
        return await self._client.answer(self._key)

    async def step(self, text: str, calls: Sequence[ToolCall] = ()) -> EnvironmentResult:
        """Send a turn and return the answer."""
        self._client.environments.step(self._key, text, calls)
        return await self._client.answer(self._key)


class EnvironmentClient:
    """Client of a run's environments. All methods belong to one event loop."""

    def __init__(self, environments: Environments, *, max_environments: int | None = None) -> None:
        """`max_environments`: most open environments, counted separately for training and for a validation,
        which must not wait for interrupted episodes."""
        self.environments = environments
        self._places = {validates: _Places(max_environments) for validates in (False, True)}
        self._answers: dict[str, asyncio.Future[EnvironmentResult]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._readable = asyncio.Event()
        self._watched: set[int] = set()

    @contextlib.asynccontextmanager
    async def opened(
        self,
        order: tuple[int, int],
        key: str,
        environment: str,
        task: Mapping[str, Any],
        seed: int,
        *,
        model: tuple[str, str] | None = None,
    ) -> AsyncIterator[OpenEnvironment]:
        """Open an environment, and close it at the end.

        Args:
            order: (prompt, sample), by which episodes queue for a place.
            key: Unique among the run's episodes.
            model: URL and key of the model of a program, whose opening is its result.
        """
        places = self._places[order[0] < 0]
        await places.take(order)
        try:
            if model is None:
                self.environments.open(key, environment, task, seed)
            else:
                self.environments.run(key, environment, task, seed, *model)
            try:
                yield OpenEnvironment(self, key)
            finally:
                self._answers.pop(key, None)
                self.environments.close(key)
        finally:
            places.give_back()

    async def answer(self, key: str) -> EnvironmentResult:
        """Wait for the next answer of an open episode's environment."""
        future = self._answers[key] = asyncio.get_running_loop().create_future()
        if self._listening is None or self._listening.done():
            self._listening = asyncio.ensure_future(self._listen())
        self._readable.set()
        return await future

    async def _listen(self) -> None:
        try:
            while self._answers:
                self._readable.clear()
                for answer in self.environments.poll(0.0):
                    if (future := self._answers.pop(answer.key, None)) is not None and not future.done():
                        future.set_result(answer)
                if self._answers:
                    await self._wait_for_input()
        except Exception as error:
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(error)
            self._answers.clear()
        finally:
            self._watch(())

    async def _wait_for_input(self) -> None:
        """Wait until a host sends something, a caller awaits an answer, or a check is due."""
        self._watch(self.environments.descriptors())
        seconds = UNSENT_SECONDS if self.environments.has_unsent else POLL_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._readable.wait()
        self._watch(())

    def _watch(self, descriptors: Iterable[int]) -> None:
        """Watch only these descriptors. None is watched during a poll, which may close and open some."""
        loop = asyncio.get_running_loop()
        for descriptor in self._watched:
            loop.remove_reader(descriptor)
        self._watched = set(descriptors)
        for descriptor in self._watched:
            loop.add_reader(descriptor, self._readable.set)


class _Places:
    """A number of places, given to waiting callers in order."""

    def __init__(self, count: int | None) -> None:
        self._left = count
        self._waiting: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []
        self._num_queued = 0

    async def take(self, order: tuple[int, int]) -> None:
        if self._left is None:
            return
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        self._num_queued += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, self._num_queued, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        if self._left is None:
            return
        while self._waiting:
            *_, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return
        self._left += 1
