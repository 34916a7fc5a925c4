"""Time the eight phases of a step: which one runs, how long each took, and how long the driver waited.

Seconds are from the monotonic clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

PHASES = ("generate", "reward", "filter", "recompute", "estimate", "update", "save", "sync")
"""Phases in the order of a step; start_up, validate and shutdown are outside it."""
STREAM_PHASES = (*PHASES[:6], "transfer", "pause", *PHASES[6:])
"""Phases of the stream schedule; on shared slots pause precedes the trainer's phases, without a transfer."""
Event = Literal["enter", "wait", "leave"]


class PhaseClock:
    """Clock that names the running phase and adds up each phase's seconds until they are taken."""

    def __init__(self) -> None:
        self.current = "start_up"
        self.depth = 0
        """Nesting depth of the phases that the thread is in; 0 between them."""
        self.step = 0
        """Current or last step of the loop; 0 before the first."""
        self.listeners: list[Callable[[Event], None]] = []
        """Called when a phase begins, about once a second while it waits, and when it succeeds."""
        self._seconds: dict[str, float] = {}
        self._noted: dict[str, float] = {}
        self._waited = 0.0
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; after an exception, `current` keeps the name of the phase that raised it."""
        outer, start = self.current, time.monotonic()
        self.current = name
        self.depth += 1
        try:
            self._notify("enter")
            yield
            self._notify("leave")
        finally:
            self.depth -= 1
        self.current = outer
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the driver's thread waits, nested waits once; no-op in other threads."""
        if threading.get_ident() != self._thread:
            yield
            return
        start, waited = time.monotonic(), self._waited
        try:
            yield
        finally:
            self._waited = waited + time.monotonic() - start
        self._notify("wait")

    def take_waited(self) -> float:
        """Return the seconds inside `waiting` since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _notify(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep what a listener measured of a phase until it is taken."""
        self._noted |= metrics

    def noted(self, names: Iterable[str]) -> dict[str, float]:
        """Return the noted metrics of these names."""
        return {name: self._noted[name] for name in names if name in self._noted}

    def take(self) -> dict[str, float]:
        """Return `time/<phase>_seconds` of all phases since the last call, and what was noted of them."""
        metrics = {f"time/{name}_seconds": seconds for name, seconds in self._seconds.items()} | self._noted
        self._seconds, self._noted = {}, {}
        return metrics
