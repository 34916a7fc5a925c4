"""Time that a program had to itself, on a machine that others use too.

Own time is time by the clock less what the program waited for a processor. One that computes has as much of
it as processor time, one that sleeps or waits for a pipe has all of the clock's, one that is starved has next
to none: so a limit of own time means the same on a free machine and on a busy one.

Source of the figures: /proc/TID/schedstat, nanoseconds on a processor and nanoseconds in a run queue
(the kernel's Documentation/scheduler/sched-stats.rst). Where a kernel keeps none, what was not computed counts
as starved, and a program that only sleeps ends by the observer's patience.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mrl.errors import RewardError

PATIENCE_SECONDS = 25.0
"""By the clock, beyond a limit of own time, before a program that is starved is given up."""

_FIRST_TICK_SECONDS, _TICK_SECONDS = 0.02, 0.25
"""Between two looks: as long as there was before them, between these. What a process waited after the last look
before its end is not known."""
_NANO = 1e-9
_HAS_FIGURES = Path("/proc/self/schedstat").exists()


class Starved(RewardError):
    """The machine gave a program too little processor time to say anything about it: never a value."""

    def __init__(self, own: float, clock: float) -> None:
        super().__init__(
            f"starved: {own:.2f} s of its own in {clock:.1f} s by the clock, with a busy machine"
        )


@dataclasses.dataclass(slots=True)
class Allowance:
    """What the runs of one piece of work may use together."""

    left: float
    """Seconds of own time."""
    until: float
    """When the observer's patience ends (monotonic seconds)."""

    @classmethod
    def of(cls, seconds: float) -> Allowance:
        """From now on."""
        return cls(seconds, time.monotonic() + seconds + PATIENCE_SECONDS)

    def require_patience(self, own: OwnTime) -> None:
        """Raises Starved where the observer has waited for a program as long as it will."""
        if time.monotonic() > self.until:
            raise Starved(own.seconds, own.waited)


class OwnTime:
    """Own time and processor time of a process with all below it, from now on.

    Counts while its `with` block is open, which is where the observer waits for the process: what the
    observer itself waits for a processor meanwhile is not the process' time either.
    """

    def __init__(self, pid: int, *, limit: float = math.inf) -> None:
        """`limit`: seconds of own time that the observer allows; a look is due when they may be over."""
        self._pid, self._limit = pid, limit
        self._figures = _figures(pid)
        self._began = self._entered = self._looked = time.monotonic()
        self._delayed = 0.0
        self.waited = 0.0
        """Seconds inside the block, by the clock: no less than the own time."""
        self.seconds = 0.0
        """Own time, at the last look."""
        self.cpu = 0.0
        """Seconds on a processor, at the last look."""
        self.starved = 0.0
        """Seconds without one though it was wanted, at the last look."""

    def __enter__(self) -> OwnTime:
        self._entered, self._delayed = time.monotonic(), _own_delay()
        return self

    def __exit__(self, *error: object) -> None:
        self.waited += max(0.0, time.monotonic() - self._entered - (_own_delay() - self._delayed))

    @property
    def pause(self) -> float:
        """Seconds until the next look is due; 0 when it is."""
        left = max(self._limit - self.seconds, _FIRST_TICK_SECONDS)
        tick = min(max(self._looked - self._began, _FIRST_TICK_SECONDS), _TICK_SECONDS, left)
        return max(0.0, self._looked + tick - time.monotonic())

    def look(self) -> bool:
        """Bring the figures up to date; whether they are. They stay as they were while all that is runnable stands in a run queue,
        because such a wait is not known before it ends, and once the process is gone."""
        after = _figures(self._pid)
        self._looked = time.monotonic()
        moved = [
            (cpu - before[0], delay - before[1])
            for tid, (cpu, delay) in after.items()
            if (before := self._figures.get(tid, (0.0, 0.0))) != (cpu, delay)
        ]
        if not after or (not moved and any(map(_is_runnable, after))):
            return False
        self._figures = after
        cpu = sum(cpu for cpu, _ in moved)
        # What one thread of the run computes may hold up each of the others: that is no starving.
        self.starved += max(0.0, sum(delay for _, delay in moved) - (len(moved) - 1) * cpu)
        self.cpu += cpu
        self.seconds = max(0.0, self.waited - self.starved) if _HAS_FIGURES else self.cpu
        return True


def wait_within(own: OwnTime, allowance: Allowance, poll: Callable[[float], bool], *, seconds: float) -> bool:
    """Wait until a process has something to say, which `poll(seconds)` tells.

    Returns:
        False if it used up `seconds` of its own time before.

    Raises:
        Starved: The machine gave it too little processor time until the observer's patience ended.
    """
    while True:
        if not own.pause:
            own.look()
        if own.seconds >= seconds:
            return False
        allowance.require_patience(own)
        with own:
            ready = poll(own.pause)
        if ready:
            return True


def process_cpu(pid: int) -> float:
    """Seconds on a processor of one process, without those below it; 0 for one that is gone."""
    return sum(cpu for cpu, _ in map(_schedstat, _threads(pid)))


def _figures(pid: int) -> dict[int, tuple[float, float]]:
    """Seconds on a processor and in a run queue of every thread of a process and of all below it, without those
    that ended while they were asked."""
    asked = {tid: _schedstat(tid) for process in _tree(pid) for tid in _threads(process)}
    return {tid: figures for tid, figures in asked.items() if any(figures)}


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for tid in _threads(pid):
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{tid}/children").read_text().split():
                yield from _tree(int(child))


def _threads(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return []


def _schedstat(tid: int | str) -> tuple[float, float]:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{tid}/schedstat", "rb") as file:
        cpu, delay, _ = file.read().split()
        return int(cpu) * _NANO, int(delay) * _NANO
    return 0.0, 0.0


def _own_delay() -> float:
    return _schedstat("thread-self")[1]


def _is_runnable(tid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{tid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"R"
    return False
