"""An event loop in a thread of its own, and blocking calls into it that look after workers meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from mrl.errors import MrlError, RolloutError
from mrl.observe.phases import PhaseClock

LOOK_SECONDS = 1.0
"""Between two looks at the workers while the caller waits."""
CALL_SECONDS = 600.0
"""Longest wait for a call without a deadline of its own."""


class EventThread:
    """What fails in the loop is raised by the call under way, or the next one."""

    def __init__(self, name: str, clock: PhaseClock) -> None:
        """Start the thread. `clock` counts what is waited here, and its listeners look after the workers."""
        self.clock = clock
        self._aio = uvloop.new_event_loop()
        self._aio.set_exception_handler(self._unhandled)
        self._failed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._aio.run_forever, name=name, daemon=True)
        self._thread.start()

    def do[R](
        self,
        work: Coroutine[Any, Any, R],
        seconds: float = CALL_SECONDS,
        late: Callable[[], MrlError] | None = None,
    ) -> R:
        """Run a coroutine in the thread and return its result; meanwhile the clock's listeners look after the workers.

        Raises:
            MrlError: What `late` returns, if the result is not there in time; or what failed in the thread before.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._aio)
        deadline = time.monotonic() + seconds
        try:
            while not future.done():
                left = deadline - time.monotonic()
                if left < 0:
                    raise (
                        late()
                        if late
                        else RolloutError(
                            f"engines did not answer within {seconds:g} s in phase {self.clock.current}"
                        )
                    )
                with self.clock.waiting():
                    both = [future, self._failed]
                    concurrent.futures.wait(
                        both, timeout=min(LOOK_SECONDS, left), return_when=concurrent.futures.FIRST_COMPLETED
                    )
                if self._failed.done():
                    self._failed.result()
            return future.result()
        finally:
            future.cancel()

    def ask[R](self, function: Callable[[], R]) -> R:
        """Run a function in the thread and return its result."""

        async def call() -> R:
            return function()

        return self.do(call())

    def fail(self, error: BaseException) -> None:
        """Let the call under way, or the next one, raise an error."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail for what a callback raised: nobody else would hear of it."""
        loop.default_exception_handler(context)
        if isinstance(error := context.get("exception"), Exception):
            self.fail(error)

    def cpu_seconds(self) -> float:
        """Return the processor seconds that the thread has used."""
        assert self._thread.ident is not None, "it was started"
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def close(self) -> None:
        """End what is under way, and the thread."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self._aio).result(30.0)
            self._aio.call_soon_threadsafe(self._aio.stop)
            self._thread.join(30.0)
            self._aio.close()
