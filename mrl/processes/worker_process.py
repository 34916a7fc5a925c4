"""A worker process as the one that started it sees it: start, send, kill by pid. Owns no policy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess

from mrl.processes.channel import ErrorTail, Line
from mrl.processes.own_time import OwnTime, process_cpu
from mrl.processes.start import child_environment, kill_session, module_words


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended."""

    status: int
    """Exit status; negative for a signal's number."""
    last_words: str
    """The end of its standard error, printable."""

    def __str__(self) -> str:
        return f"status {self.status}, {self.last_words}"


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """Of the time since a worker began."""

    computed: float = 0.0
    """Seconds on a processor of its own process, without those it started."""
    starved: float = 0.0
    """Seconds it waited for a processor."""
    is_known: bool = True
    """Whether it does not stand in a run queue at this moment: how long it will is not known."""


class WorkerProcess(Line):
    """A process of a module of ours that is given its parent's pid, in its own session so that its children go with it.

    It must be started from a thread that lives as long as it should: it dies with that thread.
    """

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            module_words(module, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        super().__init__(self._process.stdin.fileno(), self._process.stdout.fileno())
        self.pid, self._tail = self._process.pid, ErrorTail(self._process.stderr.fileno())
        self.begin()

    def begin(self) -> None:
        """Count what it uses from now on."""
        self._own_time, self._cpu_before = OwnTime(self.pid), process_cpu(self.pid)

    def used(self) -> Used:
        """What it used since `begin`."""
        is_known = self._own_time.look()
        return Used(process_cpu(self.pid) - self._cpu_before, self._own_time.starved, is_known)

    def finish(self) -> None:
        """Tells it that nothing more will come."""
        assert self._process.stdin is not None
        self.flush()
        self._process.stdin.close()

    @property
    def errors(self) -> int:
        """The descriptor of what the process writes to its standard error."""
        return self._tail.descriptor

    def read_errors(self) -> bool:
        """Keep the last bytes of what the process wrote to its standard error; False at its end."""
        return self._tail.read()

    def end(self) -> WorkerExit:
        """Kill the process and its session, reap it, close the pipes."""
        kill_session(self.pid)
        end = WorkerExit(self._process.wait(), self._tail.last_words())
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return end
