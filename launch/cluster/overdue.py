"""Ends a driver that does not come back.

Every wait for a worker has a deadline. What Ray asks of its own processes on this node has none: `ray.put` waits for the object store
of a raylet that is stopped, or stands still, as long as that lives, and so does `ray.shutdown`. No error can be raised in a thread
that is inside such a call, so the process ends, as it does when it is killed: its watcher clears up, and the same command goes on
from the last checkpoint.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from mrl.launch.cluster.session_watcher import GO_ON
from mrl.observe.phases import Event, PhaseClock

LEAST_SECONDS = 60.0
"""Not the driver's own work on a busy machine, however short the deadline of a phase is."""
CLOSING_SECONDS = 120.0
"""For all that ends with the workers: what of it waits has shorter deadlines."""
WITHOUT_RAY_SECONDS = 10.0
"""For that where Ray's GCS or raylet is gone."""
LOOK_SECONDS = 1.0


class Overdue:
    """Watches the thread that makes it, which runs the phases, from `begin` to the end of the `with` block."""

    def __init__(self, clock: PhaseClock, seconds: float) -> None:
        """`seconds`: the longest that a phase may take (loop.phase_deadline_seconds), which here is counted anew whenever the
        driver begins a phase or has waited for others."""
        self._clock, self._seconds = clock, max(seconds, LEAST_SECONDS)
        self._heard, self._closing = 0.0, False
        """When the thread was heard last (monotonic)."""
        self._over = threading.Event()
        self._thread = threading.current_thread()

    def __enter__(self) -> Overdue:
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self in self._clock.listeners:
            self._clock.listeners.remove(self)

    def begin(self) -> None:
        """The workers are up."""
        self._clock.listeners.append(self)
        threading.Thread(target=self._watch, name="overdue", daemon=True).start()

    def closing(self, *, without_ray: bool = False) -> None:
        """The workers are ended from here on; `without_ray`: and much of that asks a process that is gone."""
        self._seconds = WITHOUT_RAY_SECONDS if without_ray else CLOSING_SECONDS
        self._heard, self._closing = time.monotonic(), True

    def __call__(self, event: Event) -> None:
        self._heard = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            # Between two steps the thread may be its caller's.
            inside = self._closing or self._clock.depth > 0
            if inside and time.monotonic() - self._heard > self._seconds:
                print(f"mrl: WorkerLost: {self._said()}", file=sys.stderr, flush=True)
                os._exit(1)

    def _said(self) -> str:
        frame = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))[-1]
        path = Path(frame.filename)
        when = "while it ended the workers" if self._closing else f"in phase {self._clock.current}"
        ray = "; Ray's raylet or GCS on this node does not answer" if "ray" in path.parts else ""
        return (
            f"the driver did not come back within {self._seconds:g} s {when} from {frame.name} "
            f"({'/'.join(path.parts[-3:])}:{frame.lineno}){ray}; {GO_ON}, if there is one"
        )
