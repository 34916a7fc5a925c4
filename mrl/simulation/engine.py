"""An engine whose clock moves from one ending response to the next.

Between two ends the same b sequences are decoded, so that k steps from a context of C tokens take
k * (step_seconds[b] + per_context * C) + per_context * b * k * (k - 1) / 2 seconds.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from mrl.simulation.leaves import EngineSpeed

NEVER = math.inf
_SMALL = 1e-6
"""Of a step: ends nearer than that are one."""


class Asked(NamedTuple):
    """A request as an engine takes it."""

    number: int
    """Of its sample; smaller ones are begun first, as in mrl/rollout/waiting.py."""
    tokens: int
    """That it still has to produce."""
    context: int
    """Tokens that it has, which are computed when it is begun."""


class Running(NamedTuple):
    """A request that was begun."""

    end: float
    """The engine's step that ends it."""
    number: int
    tokens: int
    """That it was to produce when it was begun."""
    size: int
    """Its context at its end."""


class Engine:
    """Requests of one engine. It is told the time by whoever calls; between calls nothing changes."""

    __slots__ = ("_context", "_now", "_running", "_speed", "_steps", "_waiting", "busy_seconds", "stamp")

    def __init__(self, speed: EngineSpeed) -> None:
        self._speed = speed
        self._now, self._steps, self._context = 0.0, 0.0, 0.0
        self._running: list[Running] = []
        self._waiting: list[Asked] = []
        self.busy_seconds = 0.0
        self.stamp = 0
        """Goes up with whatever changes the next end."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self._running and not self._waiting

    def submit(self, asked: Asked) -> None:
        """One more request, to be begun by `begin`."""
        heapq.heappush(self._waiting, asked)

    def begin(self, now: float) -> float:
        """Begins what fits at this time; when the next response ends."""
        self._pass(now)
        speed, running, waiting = self._speed, self._running, self._waiting
        prefilled = 0
        while waiting and len(running) < speed.capacity:
            number, tokens, context = heapq.heappop(waiting)
            heapq.heappush(running, Running(self._steps + tokens, number, tokens, context + tokens))
            prefilled += context
        self._context += prefilled
        seconds = prefilled * speed.prefill_seconds
        self._now += seconds
        self.busy_seconds += seconds
        self.stamp += 1
        return self._next_end()

    def end(self, now: float) -> list[Running]:
        """The responses that end at this time, which `begin` gave."""
        running = self._running
        first = running[0].end
        self.busy_seconds += now - self._now
        self._now = now
        self._context += len(running) * (first - self._steps)
        self._steps = first
        ended = []
        while running and running[0].end <= first + _SMALL:
            ended.append(heapq.heappop(running))
            self._context -= ended[-1].size
        return ended

    def park(self, now: float) -> list[tuple[Running, int]]:
        """Takes out what was begun; (request, tokens it still has to produce), oldest first. What waits stays."""
        self._pass(now)
        self.stamp += 1
        parked = sorted(self._running, key=lambda each: each.number)
        self._running, self._context = [], 0.0
        return [(each, max(1, math.ceil(each.end - self._steps - _SMALL))) for each in parked]

    def _next_end(self) -> float:
        if not self._running:
            return NEVER
        fixed, growing = self._rates()
        steps = self._running[0].end - self._steps
        return self._now + steps * (fixed + growing * steps)

    def _rates(self) -> tuple[float, float]:
        """k steps from here take k * (first + second * k) seconds."""
        speed, sequences = self._speed, len(self._running)
        growing = speed.seconds_per_context * sequences / 2
        return speed.step(sequences, self._context) - growing, growing

    def _pass(self, now: float) -> None:
        """Moves the clock to a time before the next end."""
        if now <= self._now:
            return  # it computes prompts until later than now
        if self._running:
            seconds = now - self._now
            fixed, growing = self._rates()
            root = math.sqrt(fixed * fixed + 4 * growing * seconds)
            steps = 2 * seconds / (fixed + root)
            self._steps += steps
            self._context += len(self._running) * steps
            self.busy_seconds += seconds
        self._now = now
