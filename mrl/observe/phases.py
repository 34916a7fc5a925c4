"""The eight phases of a step by name: what runs now, how long each took, and how long the driver waited.

Seconds are of the monotonic clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

PHASES = ("generate", "reward", "filter", "recompute", "estimate", "update", "save", "sync")
"""The order of a step; start_up, validate and shutdown lie outside it."""
STREAM_PHASES = (*PHASES[:6], "park", *PHASES[6:])
"""A stream's has one more, which on shared slots comes before the trainer's phases."""
Event = Literal["enter", "wait", "leave"]


class PhaseClock:
    """Names the phase that runs and adds up the seconds of each until they are taken."""

    def __init__(self) -> None:
        self.current = "start_up"
        self.depth = 0
        """Of the phases inside of each other that the thread is in; 0 between them."""
        self.step = 0
        """The step of the loop that runs, or ran last; 0 before the first."""
        self.listeners: list[Callable[[Event], None]] = []
        """Called when a phase begins, about once a second while it waits for others, and when it ends well."""
        self._seconds: dict[str, float] = {}
        self._noted: dict[str, float] = {}
        self._waited = 0.0
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Runs a phase; `current` keeps the name of the one that an exception came from."""
        outer, start = self.current, time.monotonic()
        self.current = name
        self.depth += 1
        try:
            self._tell("enter")
            yield
            self._tell("leave")
        finally:
            self.depth -= 1
        self.current = outer
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The driver's thread does nothing here but wait for workers or reward workers; what waits inside counts once. In any other
        thread it counts nothing and tells nobody."""
        if threading.get_ident() != self._thread:
            yield
            return
        start, waited = time.monotonic(), self._waited
        try:
            yield
        finally:
            self._waited = waited + time.monotonic() - start
        self._tell("wait")

    def take_waited(self) -> float:
        """Seconds inside `waiting` since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _tell(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keeps what a listener measured of a phase until it is taken."""
        self._noted |= metrics

    def noted(self, names: Iterable[str]) -> dict[str, float]:
        """What is kept under these names."""
        return {name: self._noted[name] for name in names if name in self._noted}

    def take(self) -> dict[str, float]:
        """`time/<phase>_seconds` of all phases since the last call, and what was noted of them."""
        metrics = {f"time/{name}_seconds": seconds for name, seconds in self._seconds.items()} | self._noted
        self._seconds, self._noted = {}, {}
        return metrics
