"""When engines on the trainer's slots are to wake: where what is left of a wait for groups is worth more than the hand-overs.

The wait that is left follows from the work that a step's groups take, in seconds of one engine: what the steps before took (a mean that
halves with each step) less what was done since the last one, by the engines that do it. Once more was done than expected, a wait
is expected to take as long again as it is overdue; so in the first step, of which nothing is known.

Engines that wake shorten it by their share of the requests that are then at work at once. What all own engines run at
once already gains nothing by moving, so that engines which are not full wake nobody:

    gain = left * (1 - running(own) / running(all)),  running(n) = min(unfinished, n * at_once)

The gain must be MARGIN times what the hand-overs took last.

Whoever calls tells the time, so that a run and its simulation decide alike. Pure.
"""

from __future__ import annotations

MARGIN = 2.0
"""Measured times scatter, and engines may slow each other down where they share processors, which the rule does not see. In the
simulator 1 to 2 are equally good, and 3 begins to lose (tests/mrl/simulation/test_elastic.py)."""


class Waking:
    """The rule of one run, and what it measured."""

    def __init__(self, *, own: int, sleepers: int, at_once: int) -> None:
        """Engines with slots of their own, those on the trainer's, and the requests that one runs at once."""
        self._own, self._all, self._at_once = own, own + sleepers, at_once
        self._working, self._since, self._done = 0, 0.0, 0.0
        self._needed: float | None = None
        self.hand_overs = float("inf")
        """Seconds that waking and giving back take together, as they did last."""

    def work(self, now: float, engines: int) -> None:
        """From `now` on so many engines work."""
        self._done += self._working * (now - self._since)
        self._working, self._since = engines, now

    def take(self, now: float) -> None:
        """A step took its groups."""
        self.work(now, self._working)
        self._needed = self._done if self._needed is None else (self._needed + self._done) / 2
        self._done = 0.0

    def left(self, now: float) -> float:
        """Seconds that the engines with slots of their own still take for the next groups."""
        done = self._done + self._working * (now - self._since)
        return abs((self._needed or 0.0) - done) / self._own

    def pays(self, now: float, unfinished: int) -> bool:
        """Whether to wake while a step waits for groups whose responses are missing; `unfinished`: all requests that engines
        have."""
        running = min(unfinished, self._all * self._at_once)
        if not running:
            return False
        share = 1 - min(unfinished, self._own * self._at_once) / running
        return self.left(now) * share > MARGIN * self.hand_overs
