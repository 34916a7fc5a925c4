"""When the windows of one session were packed, on their way and taken, at one process, by its machine's clock.

| what | from | to |
|---|---|---|
| pack | a trainer rank begins to copy a window's messages into its send bucket | they lie there |
| travel | it starts them | what its slot gets of the others in this window is there |
| take | a receiver is told of a window | its copies out of messages and of leased memory are made |
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

What = Literal["pack", "travel", "take"]


class Span(NamedTuple):
    """One thing that was done for one window; begin and end in seconds of time.monotonic()."""

    what: What
    window: int
    begin: float
    end: float


class Timeline:
    """Of one session."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """In the order of their ends."""
        self._begun: dict[tuple[What, int], float] = {}

    def begin(self, what: What, window: int) -> None:
        self._begun[what, window] = time.monotonic()

    def end(self, what: What, window: int) -> None:
        """Does nothing for what was not begun."""
        if (begin := self._begun.pop((what, window), None)) is not None:
            self.spans.append(Span(what, window, begin, time.monotonic()))

    def seconds(self, what: What) -> float:
        """Of all windows together."""
        return sum(span.end - span.begin for span in self.spans if span.what == what)
