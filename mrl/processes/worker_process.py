"""Parent's view of a worker process: start it, send to it, kill it by pid. Contains no policy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess

from mrl.processes.channel import ErrorTail, WorkerPipes
from mrl.processes.own_time import OwnTimeClock, process_cpu
from mrl.processes.start import child_environment, foreign_command, kill_session, module_command


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended."""

    status: int
    """Exit status; -N for signal N."""
    stderr_tail: str
    """End of its standard error, printable."""

    def __str__(self) -> str:
        return f"status {self.status}, {self.stderr_tail}"


@dataclasses.dataclass(frozen=True, slots=True)
class TimeUsed:
    """Time that a worker used since `begin`."""

    computed: float = 0.0
    """CPU seconds of its process, without child processes."""
    starved: float = 0.0
    """Seconds it waited for a CPU."""
    is_known: bool = True
    """False if it is in a run queue now, so that the length of this wait is not known."""


class WorkerProcess(WorkerPipes):
    """A process that runs a module with its parent's pid as argument, in its own session, killed with its
    children.

    Start it from a thread that lives long enough: it dies with that thread.
    """

    def __init__(self, module: str, *, python: str | None = None) -> None:
        """`python`: interpreter of another virtual environment, with its own packages first."""
        words = (module, str(os.getpid()))
        self._process = subprocess.Popen(
            foreign_command(python, *words) if python else module_command(*words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"} if python else child_environment(),
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        super().__init__(self._process.stdin.fileno(), self._process.stdout.fileno())
        self.pid, self._tail = self._process.pid, ErrorTail(self._process.stderr.fileno())
        self.begin()

    def begin(self) -> None:
        """Start counting the time it uses."""
        self._own_time, self._cpu_before = OwnTimeClock(self.pid), process_cpu(self.pid)

    def used(self) -> TimeUsed:
        """Return the time it used since `begin`."""
        is_known = self._own_time.look()
        return TimeUsed(process_cpu(self.pid) - self._cpu_before, self._own_time.starved, is_known)

    def finish(self) -> None:
        """Send what is queued and close the request pipe."""
        assert self._process.stdin is not None
        self.flush()
        self._process.stdin.close()

    @property
    def errors(self) -> int:
        """Descriptor of the process's standard error."""
        return self._tail.descriptor

    def read_errors(self) -> bool:
        """Read its standard error and keep the last bytes; return False at EOF."""
        return self._tail.read()

    def end(self) -> WorkerExit:
        """Kill the process and its session, reap it and close the pipes; return how it ended."""
        kill_session(self.pid)
        end = WorkerExit(self._process.wait(), self._tail.last_words())
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return end
