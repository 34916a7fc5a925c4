"""End a driver that hangs inside Ray.

Every wait for a worker has a deadline, but Ray's calls to its own processes on this node have none: `ray.put`
and `ray.shutdown` wait for the object store of a stopped raylet for as long as that raylet lives. No error
can be raised in a thread inside such a call, so the process exits as if killed: its watcher cleans up, and
the same command resumes from the last checkpoint.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from mrl.launch.cluster.session_watcher import RESUME_HINT
from mrl.observe.phases import Event, PhaseClock

LEAST_SECONDS = 60.0
"""Minimum, so that the driver's own work on a busy machine does not end it."""
CLOSING_SECONDS = 120.0
"""For ending the workers; every wait in it has a shorter deadline."""
WITHOUT_RAY_SECONDS = 10.0
"""For ending the workers if Ray's GCS or raylet is gone."""
LOOK_SECONDS = 1.0


class DriverWatchdog:
    """Watchdog of the thread that creates it and runs the phases, from `begin` to the end of the block."""

    def __init__(self, clock: PhaseClock, seconds: float) -> None:
        """`seconds`: loop.phase_deadline_seconds; restarts at each phase, and after waiting for others."""
        self._clock, self._seconds = clock, max(seconds, LEAST_SECONDS)
        self._heard, self._closing = 0.0, False
        """Time of the thread's last sign of life (monotonic seconds)."""
        self._over = threading.Event()
        self._thread = threading.current_thread()

    def __enter__(self) -> DriverWatchdog:
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self in self._clock.listeners:
            self._clock.listeners.remove(self)

    def begin(self) -> None:
        """Start watching; the workers are up."""
        self._clock.listeners.append(self)
        threading.Thread(target=self._watch, name="overdue", daemon=True).start()

    def closing(self, *, without_ray: bool = False) -> None:
        """Switch to the deadline for ending the workers; `without_ray`: Ray's GCS or raylet is gone."""
        self._seconds = WITHOUT_RAY_SECONDS if without_ray else CLOSING_SECONDS
        self._heard, self._closing = time.monotonic(), True

    def __call__(self, event: Event) -> None:
        self._heard = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            # Between two steps the thread may run its caller's code.
            inside = self._closing or self._clock.depth > 0
            if inside and time.monotonic() - self._heard > self._seconds:
                print(f"mrl: WorkerLost: {self._message()}", file=sys.stderr, flush=True)
                os._exit(1)

    def _message(self) -> str:
        frame = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))[-1]
        path = Path(frame.filename)
        when = "while ending the workers" if self._closing else f"in phase {self._clock.current}"
        ray = "; Ray's raylet or GCS on this node does not respond" if "ray" in path.parts else ""
        return (
            f"the driver hung for {self._seconds:g} s {when} in {frame.name} "
            f"({'/'.join(path.parts[-3:])}:{frame.lineno}){ray}; {RESUME_HINT}, if there is one"
        )
