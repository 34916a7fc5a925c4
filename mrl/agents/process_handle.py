"""Handle of one episode's process for its host, and the time of its current call."""

from __future__ import annotations

import dataclasses
import os
import resource
import time
from collections.abc import Callable
from typing import Any

from mrl.agents import environment_process
from mrl.agents.environment_limits import Deadlines
from mrl.processes.channel import ErrorTail
from mrl.processes.forked_child import ForkedChild
from mrl.processes.own_time import OwnTimeClock
from mrl.processes.start import kill_session
from mrl.rewards.code import cgroup

LONGEST = 1.75
"""Multiple of its deadline, in wall time, that a call may take if its process gets no processor."""


@dataclasses.dataclass(slots=True)
class _Call:
    """Current call of an episode's process."""

    operation: str
    turn: int
    since: float
    limit: float
    clock: OwnTimeClock

    def is_overdue(self, now: float) -> bool:
        """Return True if its own time is up, or its wall time after a very long wait for a processor."""
        waited = now - self.since
        if waited < self.limit or waited >= LONGEST * self.limit:
            return waited >= self.limit
        return self.clock.look() and waited - self.clock.starved >= self.limit


class EnvironmentProcess(ForkedChild):
    """Process of one episode, as its host sees it: start, send, read, kill. It takes no decisions."""

    def __init__(self, key: str, make: Callable[[], Any], deadlines: Deadlines, close: list[int]) -> None:
        """`close`: the host's own descriptors, which the process must not have."""
        errors, errors_in = os.pipe()

        def serve(requests: int, replies: int) -> None:
            os.setsid()
            os.dup2(errors_in, 1)
            os.dup2(errors_in, 2)
            for descriptor in (*close, errors_in, errors):
                os.close(descriptor)
            limit = deadlines.memory_mib * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            environment_process.serve(make, requests, replies)

        self.key, self._deadlines = key, deadlines
        super().__init__(serve, limit=deadlines.answer_kib * 1024)
        os.close(errors_in)
        self._tail = ErrorTail(errors, kept_bytes=1000)
        self.call: _Call | None = None

    def begin(self, operation: str, turn: int, payload: bytes) -> None:
        """Send it a call; the call's time counts from now."""
        limit = self._deadlines.of(operation)
        self.call = _Call(operation, turn, time.monotonic(), limit, OwnTimeClock(self.pid))
        self.send_bytes(payload)

    @property
    def errors(self) -> int:
        return self._tail.descriptor

    def read_errors(self) -> bool:
        """Keep the end of its output; return False if no more will come."""
        return self._tail.read()

    def finish(self) -> None:
        """Let it close its environment."""
        self.begin("close", 0, b'["close"]')

    def end(self) -> str:
        """Kill the process and its session; return how it ended."""
        kill_session(self.pid)
        words = self._tail.last_words(300)
        status = self.reap()
        cgroup.kill_owned_by(self.pid)  # of a sandbox that it left open
        os.close(self.errors)
        return f"its process ended with status {status}: {words}"
