"""Stop a run on request: a first one finishes the step and saves; a second, or an early one, exits now.

SIGINT (Ctrl-C) and SIGTERM end the run. SIGUSR1 (a batch system's warning before its time limit) also
requests to be queued again, by the exit code. A SIGTERM within ONE_REQUEST_SECONDS of another is the same
request: `timeout` and some batch systems signal a command and its group. Programs call `request_stop`.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from mrl.observe.streams import write_stderr

REQUEUE_EXIT_CODE = 99
"""The batch script queues the job again for this code."""
ONE_REQUEST_SECONDS = 1.0
NOTHING_LEARNED_EXIT_CODE = 4
"""All steps are done, and no step had a gradient."""


class ExitNow(KeyboardInterrupt):
    """Raised by a signal that must exit at once.

    Its own class, because Python kills itself with SIGINT, whatever the exit code, if a KeyboardInterrupt has
    passed through exec() or eval() of text (`unhandled_keyboard_interrupt` in CPython's pythonrun.c), common
    in imports. A subclass of KeyboardInterrupt, because Ray's C++ only passes that on.
    """


class StopSignals:
    """Signal handlers of a run, active inside the block in the main thread; the loop calls `reason`."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self.stepping = False
        """True once there is a step to finish; until then a signal raises ExitNow at once."""
        self.exit_code = 0
        self._old: dict[int, object] = {}
        self._asked_by, self._asked_at = 0, 0.0

    def reason(self) -> str | None:
        """Return why to stop, or None."""
        return self._reason

    def request_stop(self, reason: str) -> None:
        """Request to stop once the current step is finished and saved; the first reason is kept."""
        self._reason = self._reason or reason

    def begin_steps(self) -> None:
        """Mark that there is a step to finish. Raise an earlier request again: its exception may have been
        lost in a destructor or a library's callback."""
        if self._reason is not None:
            raise ExitNow(self._reason)
        self.stepping = True

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name, previous, at = signal.Signals(number).name, self._asked_by, self._asked_at
        self._asked_by, self._asked_at = number, time.monotonic()
        if number == previous == signal.SIGTERM and self._asked_at - at < ONE_REQUEST_SECONDS:
            self._asked_at = at
            return
        if not self.stepping:
            self._reason, self.exit_code = name, _exit_code(number)
            write_stderr(f"{name} before the first step: exiting now")
            raise ExitNow(name)
        if self._reason is not None and number != signal.SIGUSR1:
            write_stderr(f"{name} again: exiting now, this step is lost")
            raise ExitNow(f"{name} twice")
        self._reason = name
        self.exit_code = _exit_code(number)
        write_stderr(f"{name}: finishing this step, saving, then exiting; send it again to exit now")


def _exit_code(number: int) -> int:
    return REQUEUE_EXIT_CODE if number == signal.SIGUSR1 else 128 + number
