"""The only thread that calls vLLM: it runs commands between steps and steps while there is work.

| waits for | unblocked by |
|---|---|
| work, while idle or paused | a command |
| the other dp ranks, before each step | their votes, within rollout.step_deadline_seconds |

All dp ranks pause at the same step, once every rank has the command. An idle rank polls for commands briefly
and votes again (`RolloutEngine.vote`), so that no rank waits for a message that only another rank got.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mrl.errors import RolloutError
from mrl.rollout.request import Completion

if TYPE_CHECKING:
    from mrl.rollout.engine import PauseReport, RolloutEngine

_IDLE_SECONDS = 0.02
"""How long an idle dp rank waits for commands before it votes again."""


class EngineListener(Protocol):
    """Receiver of the engine's results; called in the engine's thread."""

    def completed(self, completions: Sequence[Completion], *, idle: bool) -> None:
        """Take completions; `idle` if the engine has nothing left to do."""
        ...

    def failed(self, error: BaseException) -> None:
        """Take the error that stopped the engine for good."""
        ...


class EngineLoop(threading.Thread):
    """Thread that owns one engine; paused until `resume`."""

    def __init__(self, make: Callable[[], RolloutEngine], listener: EngineListener) -> None:
        """Create the thread. `make` builds the engine in it; wait for `ready`."""
        super().__init__(name="engine", daemon=True)
        self._make, self._listener = make, listener
        self._commands: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = (
            queue.SimpleQueue()
        )
        self.engine: RolloutEngine
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done once the engine is built; fails with the error of building it."""
        self.num_steps = 0
        self.is_busy = False
        """True during a step and its vote."""
        self._paused, self._closed, self._others_work = True, False, False
        self._pausing: list[concurrent.futures.Future[PauseReport]] = []
        self._failure: BaseException | None = None

    def call[R](self, function: Callable[[RolloutEngine], R]) -> concurrent.futures.Future[R]:
        """Run a function of the engine between two steps; return the future of its value."""
        return self._put(lambda: function(self.engine))

    def pause(self) -> concurrent.futures.Future[PauseReport]:
        """Stop stepping at a token boundary (`RolloutEngine.pause`); nothing steps until `resume`."""
        done: concurrent.futures.Future[PauseReport] = concurrent.futures.Future()
        self._put(lambda: self._pausing.append(done)).add_done_callback(
            lambda queued: done.set_exception(error) if (error := queued.exception()) else None
        )
        return done

    def resume(self, *, training: bool = True) -> None:
        """Step again; with `training` False only requests of a validation run."""
        self._put(lambda: self._resume(training))

    def close(self, seconds: float = 30.0) -> None:
        """Close the engine and end the thread."""
        self._put(self._close)
        self.join(seconds)

    def _put[R](self, function: Callable[[], R]) -> concurrent.futures.Future[R]:
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        self._commands.put((future, function))
        return future

    def run(self) -> None:
        """Build the engine and serve commands until `close`."""
        try:
            self.engine = self._make()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        while not self._closed:
            try:
                self._run_once()
            except BaseException as error:  # any error: the engine's state is unknown
                self._failure = error
                self._listener.failed(error)
                self._fail_commands(error)

    def _run_once(self) -> None:
        """Run the queued commands, then one step if there is work."""
        self._run_commands(self._command_timeout())
        if self._closed or self._failure is not None or (self._paused and not self._pausing):
            return
        self.is_busy = True
        any_work, pauses = self.engine.vote(wants_pause=bool(self._pausing))
        self._others_work = any_work
        if pauses:
            self._pause()
        elif any_work:
            ended = self.engine.step()
            self.num_steps += 1
            if ended:
                self._listener.completed(ended, idle=not self.engine.has_work)
        self.is_busy = False

    def _command_timeout(self) -> float | None:
        """Return how many seconds to wait for a command: None is forever, 0 is not at all."""
        if self._paused or self._failure is not None:
            return 0.0 if self._pausing else None
        if self.engine.has_work or self._pausing or self._others_work:
            return 0.0
        return None if self.engine.part.dp == 1 else _IDLE_SECONDS

    def _run_commands(self, seconds: float | None) -> None:
        while not self._closed:
            try:
                future, function = self._commands.get(block=seconds != 0.0, timeout=seconds)
            except queue.Empty:
                return
            seconds = 0.0
            if self._failure is not None and function != self._close:
                future.set_exception(_gone(self._failure))
            else:
                try:
                    future.set_result(function())
                except BaseException as error:  # the caller decides
                    future.set_exception(error)

    def _fail_commands(self, error: BaseException) -> None:
        for done in self._pausing:
            done.set_exception(_gone(error))
        self._pausing.clear()
        self.is_busy = False

    def _pause(self) -> None:
        paused = self.engine.pause()
        self._paused, waiting, self._pausing = True, self._pausing, []
        if ended := self.engine.take_ended():
            self._listener.completed(ended, idle=True)
        for done in waiting:
            done.set_result(paused)

    def _resume(self, training: bool) -> None:
        self.engine.resume(training=training)
        self._paused = False

    def _close(self) -> None:
        self._closed = True
        self.engine.close()


def _gone(error: BaseException) -> BaseException:
    return RolloutError(f"the engine failed before: {type(error).__name__}: {error}")
