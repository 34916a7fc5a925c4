"""One start of a command: its output, its steps and its processes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from mrl.errors import MrlError
from mrl.launch.cluster.cluster import lives

LOOK_SECONDS = 0.2
STALLED_SECONDS = 420.0
"""Longest time without a step, also at the start: stopped processes are detected long before."""
ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""Becomes the command, which receives SIGTERM when the soak dies."""
STEP = re.compile(r"^step (\d+)/")


class SoakError(MrlError, RuntimeError):
    """A run of a soak stopped or made no more steps."""


class Life:
    """A running command; the end of the `with` block kills all its processes."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [*ENDS_WITH_US, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self._log, self._read, self._rest = log, 0, ""
        self.step = 0
        """Last step whose line it printed."""
        self._members = {self.process.pid: psutil.Process(self.process.pid)}

    def __enter__(self) -> Life:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def new_lines(self) -> list[str]:
        """Return the complete lines printed since the last call."""
        with self._log.open("rb") as stream:
            stream.seek(self._read)
            data = stream.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        return lines

    def family(self) -> list[psutil.Process]:
        """Return its living processes, also those whose parents have ended since they were seen."""
        for parent in list(self._members.values()):
            with contextlib.suppress(psutil.Error):
                self._members |= {child.pid: child for child in parent.children(recursive=True)}
        self._members = {pid: process for pid, process in self._members.items() if lives(process)}
        return list(self._members.values())

    def kill(self) -> None:
        """Kill its processes; psutil compares start times, so a reused pid is safe."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(60)

    def follow(
        self,
        look: Callable[[], None] = lambda: None,
        hear: Callable[[str], None] = lambda line: None,
        *,
        stalled_seconds: float = STALLED_SECONDS,
    ) -> int:
        """Wait for its end; return its exit code. Pass lines to `hear`; call `look` several times a second.
        Raise SoakError after `stalled_seconds` without a step."""
        moved_at = time.monotonic()
        running = True
        while running:
            running = self.process.poll() is None
            before = self.step
            for line in self.new_lines():
                self.step = step_of(line) or self.step
                hear(line)
            look()
            if self.step != before:
                moved_at = time.monotonic()
            if time.monotonic() - moved_at > stalled_seconds:
                raise SoakError(f"no step for {stalled_seconds:g} s after step {self.step}; see {self._log}")
            self.family()
            time.sleep(LOOK_SECONDS * running)
        return self.process.returncode


def step_of(line: str) -> int | None:
    """Return the step of a progress line, else None.

    >>> step_of("step 12/5000  reward 0.5"), step_of("resuming at step 12")
    (12, None)
    """
    match = STEP.match(line)
    return int(match[1]) if match else None


def command_of(process: psutil.Process) -> str:
    """Return the start of a process's command; the process may end meanwhile."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:120] or process.name()
    return f"process {process.pid}"
