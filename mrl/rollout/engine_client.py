"""The driver's end of one engine: a request is an awaitable, and a closed connection is the engine's death."""

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
"""The handle of a block of routes, by its number in the engine's process."""


class EngineLost(Exception):
    """The engine is gone, or was given up; what it had is to be generated elsewhere."""


class EngineClient:
    """One engine. All methods belong to one event loop."""

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
        """Why the engine is gone; empty while it is there."""
        self.failure: engine_messages.Failure | None = None
        self._stream: FrameStream
        self._reading: asyncio.Task[None]

    async def connect(self, address: Address, secret: bytes) -> None:
        """Connect and prove to know the secret. OSError (TimeoutError too) or MsgspecError if no engine takes the connection."""
        async with asyncio.timeout(CONNECT_SECONDS):
            self._stream = await FrameStream.connect(*address)
            await prove(self._stream, secret)
        self._reading = asyncio.ensure_future(self._read())

    def silent_seconds(self) -> float:
        """Return how long the engine has had work that it may do and made no step. May be called in any thread."""
        return time.monotonic() - self._progressed if self._futures and not self._paused else 0.0

    async def submit(self, request: GenerationRequest) -> Completion:
        """Return what comes of a request. Requests of one turn of the loop leave in one message, by prompt and sample.

        Raises:
            EngineLost: The engine is gone.
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
        """Stop the engine at a token boundary; what it says of it, and what has come so far of each request.

        Raises:
            EngineLost: The engine is gone.
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
            self.give_up(f"{self.name}: what it paused could not be taken: {error!r}")
            raise EngineLost(self.lost) from error

    def resume(self, *, training: bool = True) -> None:
        """Let the engine step again; with `training` False only requests of a validation."""
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
        asked, self._outbox = self._outbox, []
        asked = [request for request in asked if request.request_id in self._futures]
        if asked:
            self._send(engine_messages.submit(asked))

    def _send(self, message: engine_messages.EngineMessage) -> None:
        if not self.lost:
            self._stream.write(engine_messages.encode(message))

    async def _read(self) -> None:
        why = f"{self.name} closed its connection"
        try:
            while (data := await self._stream.read()) is not None:
                await self._heard(engine_messages.decode(data))
        except Exception as error:  # of any kind: nothing more would be heard of what is open
            why = f"{self.name}: its connection failed: {error!r}"
        self.give_up(why)

    async def _heard(self, message: Any) -> None:
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
                if message.num_steps != self._num_steps or not message.is_busy:  # idle: what it has is held
                    self._num_steps, self._progressed = message.num_steps, time.monotonic()
            case engine_messages.Failure():
                self.failure = message
                self.give_up(f"{self.name} failed: {message.text}")
            case _:
                raise RolloutError(f"{self.name} sent {type(message).__name__}")

    async def _completions(self, message: engine_messages.Ended) -> list[Completion]:
        block = None
        if message.block >= 0 and self._block_of is not None:
            block = await self._block_of(message.block)
        return engine_messages.completions_of(message, block)
