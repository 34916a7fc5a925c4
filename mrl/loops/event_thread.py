"""Event loop in its own thread, and blocking calls into it that watch the workers meanwhile."""

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

CHECK_SECONDS = 1.0
"""Interval between two checks of the workers while a caller waits."""
CALL_SECONDS = 600.0
"""Longest wait of a call that has no deadline of its own."""


class EventThread:
    """Event loop in its own thread. An error in the loop is raised by the current or the next call."""

    def __init__(self, name: str, clock: PhaseClock) -> None:
        """Start the thread. `clock` counts the waiting time, and its listeners watch the workers."""
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
        """Run a coroutine in the thread and return its result. The clock's listeners watch the workers.

        Raises:
            MrlError: From `late`, if the result is not there in time; or an earlier failure in the thread.
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
                            f"engines did not respond within {seconds:g} s in phase {self.clock.current}"
                        )
                    )
                with self.clock.waiting():
                    both = [future, self._failed]
                    concurrent.futures.wait(
                        both, timeout=min(CHECK_SECONDS, left), return_when=concurrent.futures.FIRST_COMPLETED
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
        """Let the current call, or the next one, raise an error."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail with a callback's exception, which nobody else would see."""
        loop.default_exception_handler(context)
        if isinstance(error := context.get("exception"), Exception):
            self.fail(error)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the thread has used."""
        assert self._thread.ident is not None, "the thread was started"
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def close(self) -> None:
        """Cancel all tasks and end the thread."""

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
