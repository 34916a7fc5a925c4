"""The driver's connection to one engine: a request is an awaitable; a closed connection is a lost engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from mrl.errors import RolloutError
from mrl.processes.framing import FrameStream
from mrl.rollout import engine_messages
from mrl.rollout.handshake import prove
from mrl.rollout.request import Completion, GenerationRequest

CONNECT_SECONDS = 30.0

Address = tuple[str, int]
BlockOf = Callable[[int], Awaitable[Any]]
"""Object reference of a block of routes, by the block's number in the engine's process."""


class EngineLost(Exception):
    """The engine is lost or was given up; its requests must be generated elsewhere."""


class EngineClient:
    """Connection to one engine. Call all methods from one event loop."""

    def __init__(self, name: str, *, on_lost: Callable[[str], None], block_of: BlockOf | None = None) -> None:
        """`on_lost(why)` is called once, when the connection ends or the engine fails."""
        self.name, self._on_lost, self._block_of = name, on_lost, block_of
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._outbox: list[GenerationRequest] = []
        self._pause: asyncio.Future[engine_messages.PauseDone] | None = None
        self._num_steps = -1
        self._progressed = time.monotonic()
        self._paused = True
        self.lost = ""
        """Why the engine is lost; empty while it is connected."""
        self.failure: engine_messages.Failure | None = None
        self._stream: FrameStream
        self._reading: asyncio.Task[None]

    async def connect(self, address: Address, secret: bytes) -> None:
        """Connect and prove knowledge of the run's secret.

        Raises:
            OSError, MsgspecError: No engine accepts the connection; a TimeoutError is an OSError.
        """
        async with asyncio.timeout(CONNECT_SECONDS):
            self._stream = await FrameStream.connect(*address)
            await prove(self._stream, secret)
        self._reading = asyncio.ensure_future(self._read())

    def silent_seconds(self) -> float:
        """Return the seconds that the engine has had work, was not paused and made no step. Thread-safe."""
        return time.monotonic() - self._progressed if self._futures and not self._paused else 0.0

    async def submit(self, request: GenerationRequest) -> Completion:
        """Return a request's completion. Requests submitted in one turn of the event loop share one message.

        Raises:
            EngineLost: The engine is lost.
        """
        if self.lost:
            raise EngineLost(self.lost)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if not self._futures:
            self._progressed = time.monotonic()
        self._futures[request.request_id] = future
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(request)
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(request.request_id, None) is not None:
                self._send(engine_messages.AbortRequests([request.request_id]))
            raise

    async def pause(self, *, snapshot: bool) -> tuple[engine_messages.PauseDone, list[Completion]]:
        """Stop the engine at a token boundary; return its reply and, with `snapshot`, the partial rollouts.

        Raises:
            EngineLost: The engine is lost.
        """
        if self.lost:
            raise EngineLost(self.lost)
        self._flush()
        self._pause = asyncio.get_running_loop().create_future()
        self._send(engine_messages.Pause(snapshot))
        done = await self._pause
        try:
            return done, await self._completions(done.so_far)
        except Exception as error:
            self.give_up(f"{self.name}: its snapshot at a pause could not be read: {error!r}")
            raise EngineLost(self.lost) from error

    def resume(self, *, training: bool = True) -> None:
        """Let the engine step again; with `training` False only requests of a validation run."""
        self._paused, self._progressed = False, time.monotonic()
        self._send(engine_messages.Resume(training))

    def give_up(self, why: str) -> None:
        """End the connection: every open request raises EngineLost."""
        if self.lost:
            return
        self.lost = why
        with contextlib.suppress(AttributeError):
            self._stream.close()
        with contextlib.suppress(AttributeError):
            self._reading.cancel()
        for future in [*self._futures.values(), *([self._pause] if self._pause else [])]:
            if not future.done():
                future.set_exception(EngineLost(why))
        self._futures.clear()
        self._outbox.clear()
        self._on_lost(why)

    def _flush(self) -> None:
        requests, self._outbox = self._outbox, []
        requests = [request for request in requests if request.request_id in self._futures]
        if requests:
            self._send(engine_messages.submit(requests))

    def _send(self, message: engine_messages.EngineMessage) -> None:
        if not self.lost:
            self._stream.write(engine_messages.encode(message))

    async def _read(self) -> None:
        why = f"{self.name} closed its connection"
        try:
            while (data := await self._stream.read()) is not None:
                await self._handle(engine_messages.decode(data))
        except Exception as error:  # any error: open requests would never get a response
            why = f"{self.name}: its connection failed: {error!r}"
        self.give_up(why)

    async def _handle(self, message: Any) -> None:
        match message:
            case engine_messages.Ended():
                for completion in await self._completions(message):
                    future = self._futures.pop(completion.request_id, None)
                    if future is not None and not future.done():
                        future.set_result(completion)
            case engine_messages.PauseDone():
                self._paused = True
                if self._pause is not None and not self._pause.done():
                    self._pause.set_result(message)
            case engine_messages.Pulse():
                if message.num_steps != self._num_steps or not message.is_busy:  # idle: its requests are held
                    self._num_steps, self._progressed = message.num_steps, time.monotonic()
            case engine_messages.Failure():
                self.failure = message
                self.give_up(f"{self.name} failed: {message.text}")
            case _:
                raise RolloutError(f"{self.name} sent an unexpected {type(message).__name__} message")

    async def _completions(self, message: engine_messages.Ended) -> list[Completion]:
        block = None
        if message.block >= 0 and self._block_of is not None:
            block = await self._block_of(message.block)
        return engine_messages.completions_of(message, block)
