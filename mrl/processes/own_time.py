"""Measure a program's own time: wall time without the time it waited for a CPU.

For a program that computes, own time is CPU time; for one that sleeps or waits for a pipe, it is wall time;
for one that is starved, it is almost zero. So a limit of own time means the same on an idle and on a busy
machine.

Source: /proc/TID/schedstat, nanoseconds on a CPU and nanoseconds in a run queue (the kernel's
Documentation/scheduler/sched-stats.rst). If the kernel has no such file, own time is CPU time, and a program
that only sleeps ends when the observer's patience is over.
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
"""Wall seconds beyond a limit of own time after which a starved program is given up."""

_FIRST_TICK_SECONDS, _TICK_SECONDS = 0.02, 0.25
"""Bounds of the interval between two looks; CPU wait after the last look is unknown."""
_NANO = 1e-9
_HAS_FIGURES = Path("/proc/self/schedstat").exists()


class Starved(RewardError):
    """The machine gave a program too little CPU time to judge it; no reward follows from this."""

    def __init__(self, used: float, clock: float) -> None:
        super().__init__(
            f"starved: {used:.2f} s of own time in {clock:.1f} s of wall time, because the machine is busy"
        )


@dataclasses.dataclass(slots=True)
class Allowance:
    """Time budget that the runs of one task share."""

    left: float
    """Seconds of own time."""
    until: float
    """End of the observer's patience (monotonic seconds)."""

    @classmethod
    def of(cls, seconds: float) -> Allowance:
        """Return an allowance of `seconds` of own time, starting now."""
        return cls(seconds, time.monotonic() + seconds + PATIENCE_SECONDS)

    def require_patience(self, clock: OwnTimeClock) -> None:
        """Raise Starved if the observer's patience is over."""
        if time.monotonic() > self.until:
            raise Starved(clock.seconds, clock.waited)


class OwnTimeClock:
    """Own time and CPU time of a process and its descendants, from now on.

    Counts while its `with` block is open, in which the observer waits for the process; the observer's own
    wait for a CPU is not counted.
    """

    def __init__(self, pid: int, *, limit: float = math.inf) -> None:
        """Start counting; `limit`: seconds of own time; a look is due when they may be over."""
        self._pid, self._limit = pid, limit
        self._figures = _figures(pid)
        self._began = self._entered = self._looked = time.monotonic()
        self._delayed = 0.0
        self.waited = 0.0
        """Wall seconds inside the `with` block; at least the own time."""
        self.seconds = 0.0
        """Own time at the last look."""
        self.cpu = 0.0
        """CPU seconds at the last look."""
        self.starved = 0.0
        """Seconds of waiting for a CPU at the last look."""

    def __enter__(self) -> OwnTimeClock:
        self._entered, self._delayed = time.monotonic(), _own_delay()
        return self

    def __exit__(self, *error: object) -> None:
        self.waited += max(0.0, time.monotonic() - self._entered - (_own_delay() - self._delayed))

    @property
    def pause(self) -> float:
        """Seconds until the next look is due; 0 if it is due."""
        remaining = max(self._limit - self.seconds, _FIRST_TICK_SECONDS)
        tick = min(max(self._looked - self._began, _FIRST_TICK_SECONDS), _TICK_SECONDS, remaining)
        return max(0.0, self._looked + tick - time.monotonic())

    def look(self) -> bool:
        """Update the figures; return True if they are current. They stay as they are while all runnable
        threads are in a run queue (the kernel reports such waits when they end), and after the process's
        end."""
        figures = _figures(self._pid)
        self._looked = time.monotonic()
        changes = [
            (cpu - previous[0], delay - previous[1])
            for tid, (cpu, delay) in figures.items()
            if (previous := self._figures.get(tid, (0.0, 0.0))) != (cpu, delay)
        ]
        if not figures or (not changes and any(map(_is_runnable, figures))):
            return False
        self._figures = figures
        cpu = sum(cpu for cpu, _ in changes)
        # A thread may wait while another thread of the same run computes: this is not starvation.
        self.starved += max(0.0, sum(delay for _, delay in changes) - (len(changes) - 1) * cpu)
        self.cpu += cpu
        self.seconds = max(0.0, self.waited - self.starved) if _HAS_FIGURES else self.cpu
        return True


def wait_within(
    clock: OwnTimeClock, allowance: Allowance, poll: Callable[[float], bool], *, seconds: float
) -> bool:
    """Wait until `poll(seconds)` returns True for a process.

    Returns:
        False if the process used `seconds` of own time first.

    Raises:
        Starved: The machine gave it too little CPU time until the observer's patience ended.
    """
    while True:
        if not clock.pause:
            clock.look()
        if clock.seconds >= seconds:
            return False
        allowance.require_patience(clock)
        with clock:
            ready = poll(clock.pause)
        if ready:
            return True


def process_cpu(pid: int) -> float:
    """Return the CPU seconds of one process without its descendants; 0 if it has ended."""
    return sum(cpu for cpu, _ in map(_schedstat, _threads(pid)))


def _figures(pid: int) -> dict[int, tuple[float, float]]:
    """Return (CPU seconds, run-queue seconds) by living thread of a process and its descendants."""
    by_thread = {tid: _schedstat(tid) for process in _tree(pid) for tid in _threads(process)}
    return {tid: figures for tid, figures in by_thread.items() if any(figures)}


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
