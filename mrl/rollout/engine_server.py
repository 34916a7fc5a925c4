"""Socket server of an engine's process: requests in, completions out, in its own thread.

| waits for | unblocked by |
|---|---|
| frames of its client | a driver or rollout worker; if it leaves, the engine pauses and accepts another |
| completions | the engine's thread |

Completions are batched: each waits at most WAIT_SHARE of its own generation time, so that long responses
share a message. A batch leaves at once if it has FLUSH_COUNT completions, if the engine is idle, or if
another turn follows one of them. A connection must first prove knowledge of the run's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import MsgspecError

from mrl.errors import MrlError
from mrl.processes.framing import frame, read_frame_async
from mrl.rollout import engine_messages
from mrl.rollout.engine_loop import EngineLoop
from mrl.rollout.handshake import is_proved
from mrl.rollout.request import Completion

log = logging.getLogger(__name__)

WAIT_SHARE, MOST_WAIT_SECONDS, FLUSH_COUNT = 0.05, 1.0, 64
PULSE_SECONDS = 1.0
PROOF_SECONDS = 10.0
"""Time for a connection to prove knowledge of the secret."""

Decode = Callable[[list[np.ndarray]], list[str]]
"""Token arrays [T] to texts, many at a time (mrl/data/tokenise.py, `decoder`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenRequest:
    """A request that has no completion yet."""

    since: float
    """Arrival time, by the event loop's clock."""
    own_tokens: np.ndarray
    is_urgent: bool
    """Another turn follows its completion."""


class EngineServer(threading.Thread):
    """Server for one client at a time on a listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        decode: Decode,
        *,
        keep_block: Callable[[np.ndarray], int] = lambda block: -1,
        before_failing: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Create the server; `serve` starts it.

        Args:
            keep_block: Keeps a block of routes for the driver and returns its number.
            before_failing: Called in the engine's thread before the driver gets the engine's failure.
        """
        super().__init__(name="engine-server", daemon=True)
        self._listener, self._secret, self._decode, self._keep_block = listener, secret, decode, keep_block
        self._before_failing = before_failing
        self._open: dict[str, _OpenRequest] = {}
        """By request id."""
        self._done: list[Completion] = []
        self._flushing: asyncio.TimerHandle | None = None
        """Timer of the next message, at the earliest due time of `_done`."""
        self._writer: asyncio.StreamWriter | None = None
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._aio = asyncio.new_event_loop()
        self.engine_loop: EngineLoop

    def serve(self, engine_loop: EngineLoop) -> None:
        """Start serving a running engine."""
        self.engine_loop = engine_loop
        self.start()

    def wait_until_free(self, seconds: float) -> None:
        """Wait until no client is connected and the engine has paused; TimeoutError after `seconds`."""
        asyncio.run_coroutine_threadsafe(self._is_free.wait(), self._aio).result(seconds)

    # -- called in the engine's thread (engine_loop.EngineListener) ------------------------------------------

    def completed(self, completions: Sequence[Completion], *, idle: bool) -> None:
        self._aio.call_soon_threadsafe(self._take, completions, idle)

    def failed(self, error: BaseException) -> None:
        log.error("the engine failed", exc_info=error)
        self._before_failing(error)
        kind = type(error).__name__ if isinstance(error, MrlError) else "Exception"
        self._aio.call_soon_threadsafe(
            self._send, engine_messages.Failure(kind, f"{type(error).__name__}: {error}")
        )

    # -- in this thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        asyncio.set_event_loop(self._aio)
        self._aio.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._listener, limit=engine_messages.STREAM_BYTES
        )
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                proved = await is_proved(reader, writer, self._secret)
            if not proved or not self._is_free.is_set():
                return
            self._writer = writer
            self._is_free.clear()
            pulse = asyncio.ensure_future(self._pulse())
            try:
                while (data := await read_frame_async(reader)) is not None:
                    self._handle(engine_messages.decode(data))
            finally:
                pulse.cancel()
                await self._release_client()
        except (
            TimeoutError,
            OSError,
            EOFError,
            ValueError,
            MsgspecError,
        ) as error:  # an unknown client, or a driver that disconnected
            log.warning("a connection to the engine ended: %s", error)
        finally:
            writer.close()

    async def _release_client(self) -> None:
        """Pause, forget the requests of the client that disconnected, and accept another one."""
        self._writer, request_ids = None, list(self._open)
        with contextlib.suppress(MrlError):  # the engine's failure was reported
            await asyncio.wrap_future(self.engine_loop.pause())
            if request_ids:
                await asyncio.wrap_future(self.engine_loop.call(lambda engine: engine.abort(request_ids)))
        self._open, self._done = {}, []
        self._is_free.set()

    def _handle(self, message: engine_messages.EngineMessage) -> None:
        loop = self.engine_loop
        match message:
            case engine_messages.Submit():
                requests, now = engine_messages.requests_of(message), self._aio.time()
                self._open |= {r.request_id: _OpenRequest(now, r.own_tokens, r.urgent) for r in requests}
                future = loop.call(lambda engine: engine.submit(requests))
                future.add_done_callback(self._report_refusal)
            case engine_messages.Pause():
                self._pausing = asyncio.ensure_future(self._pause(message.snapshot))
            case engine_messages.Resume():
                loop.resume(training=message.training)
            case engine_messages.AbortRequests():
                for name in message.request_ids:
                    self._open.pop(name, None)
                loop.call(lambda engine: engine.abort(message.request_ids))
            case _:
                raise ValueError(f"unexpected message from a driver: {type(message).__name__}")

    def _report_refusal(self, future: object) -> None:
        """Report requests that the engine refused."""
        if (error := future.exception()) is not None:  # type: ignore[attr-defined]
            self.failed(error)

    async def _pause(self, snapshot: bool) -> None:
        try:
            paused = await asyncio.wrap_future(self.engine_loop.pause())
            so_far: list[Completion] = []
            if snapshot:
                so_far = await asyncio.wrap_future(self.engine_loop.call(lambda engine: engine.snapshot()))
        except MrlError:
            return  # the engine's failure was reported
        self._flush()
        message = engine_messages.ended(so_far, self._keep_block)
        self._send(engine_messages.PauseDone(paused.num_requests, paused.num_tokens, message))

    async def _pulse(self) -> None:
        while True:
            self._send(engine_messages.Pulse(self.engine_loop.num_steps, self.engine_loop.is_busy))
            await asyncio.sleep(PULSE_SECONDS)

    def _take(self, completions: Sequence[Completion], idle: bool) -> None:
        self._done += completions
        due = min((self._due(completion.request_id) for completion in completions), default=0.0)
        if idle or len(self._done) >= FLUSH_COUNT or due <= self._aio.time():
            self._flush()
        elif self._flushing is None or due < self._flushing.when():
            if self._flushing is not None:
                self._flushing.cancel()
            self._flushing = self._aio.call_at(due, self._flush)

    def _due(self, request_id: str) -> float:
        """Return the time until which a completion may wait for others."""
        now, request = self._aio.time(), self._open.get(request_id)
        if request is None or request.is_urgent:
            return now
        return now + min(MOST_WAIT_SECONDS, WAIT_SHARE * (now - request.since))

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        done, self._done = self._done, []
        if done:
            self._send(engine_messages.ended(self._with_texts(done), self._keep_block))

    def _with_texts(self, completions: Sequence[Completion]) -> list[Completion]:
        texts = self._decode([self._all_tokens(completion) for completion in completions])
        return [dataclasses.replace(c, text=text) for c, text in zip(completions, texts, strict=True)]

    def _all_tokens(self, completion: Completion) -> np.ndarray:
        """Return all tokens of a response, including those of earlier requests."""
        request = self._open.pop(completion.request_id, None)
        if request is None or not len(request.own_tokens):
            return completion.tokens
        return np.concatenate([request.own_tokens, completion.tokens])

    def _send(self, message: engine_messages.EngineMessage) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(engine_messages.encode(message)))
