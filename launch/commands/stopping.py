"""Leaving on request: once means finish the step, save and go; twice, or before the first step, means go now.

SIGINT (Ctrl-C) and SIGTERM end the run; SIGUSR1 (a batch system's warning before its time limit) asks to be put in the queue
again, said by the exit code. SIGTERM again within ONE_REQUEST_SECONDS is the same request: `timeout` (coreutils) and some batch systems
signal a command and, at once, the process group that it is in. A program that runs the training asks in words (`ask`).
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from mrl.observe.streams import say

REQUEUE_EXIT_CODE = 99
"""The batch script puts the job back in the queue for this code."""
ONE_REQUEST_SECONDS = 1.0
NOTHING_LEARNED_EXIT_CODE = 4
"""All steps are done, and no step had a gradient."""


class LeaveNow(KeyboardInterrupt):
    """What a signal raises where nothing may be finished.

    A class of its own, because Python ends itself by SIGINT, whatever exit code the program asked for, once KeyboardInterrupt
    itself has passed through an exec() or eval() of text (`unhandled_keyboard_interrupt` in CPython's pythonrun.c), and
    imports are full of those. It stays a KeyboardInterrupt, which is what Ray's C++ passes on.
    """


class StopSignals:
    """Installs the handlers while entered, in the main thread (no other one can have any); the loop asks `reason` after
    every step."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self.stepping = False
        """Whether there is a step to finish; until then a signal raises LeaveNow at once."""
        self.exit_code = 0
        self._old: dict[int, object] = {}
        self._asked_by, self._asked_at = 0, 0.0

    def reason(self) -> str | None:
        """Why to stop, or None."""
        return self._reason

    def ask(self, reason: str) -> None:
        """Leaves once the step under way is finished and saved; the first reason stays."""
        self._reason = self._reason or reason

    def begin_steps(self) -> None:
        """From now on there is a step to finish. A request made before is raised again: an exception is lost where it meets
        a destructor or a callback of somebody else's code."""
        if self._reason is not None:
            raise LeaveNow(self._reason)
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
        name, before, at = signal.Signals(number).name, self._asked_by, self._asked_at
        self._asked_by, self._asked_at = number, time.monotonic()
        if number == before == signal.SIGTERM and self._asked_at - at < ONE_REQUEST_SECONDS:
            self._asked_at = at
            return
        if not self.stepping:
            self._reason, self.exit_code = name, _exit_code(number)
            say(f"{name} before the first step: leaving now")
            raise LeaveNow(name)
        if self._reason is not None and number != signal.SIGUSR1:
            say(f"{name} again: leaving now, this step is lost")
            raise LeaveNow(f"{name} twice")
        self._reason = name
        self.exit_code = _exit_code(number)
        say(f"{name}: finishing this step, saving, then leaving; once more leaves now")


def _exit_code(number: int) -> int:
    return REQUEUE_EXIT_CODE if number == signal.SIGUSR1 else 128 + number
