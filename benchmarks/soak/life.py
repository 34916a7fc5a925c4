"""One start of a command: its output as it comes, its steps, and its processes."""

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
"""Without a step, the start included: what is stopped for good has been found long before."""
ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""Becomes the command, which is asked to end when the soak is gone."""
STEP = re.compile(r"^step (\d+)/")


class SoakError(MrlError, RuntimeError):
    """A run of a soak did not go on; says since when."""


class Life:
    """A command that runs; at the end of the `with` block nothing of it does."""

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
        """The last whose line it printed."""
        self._members = {self.process.pid: psutil.Process(self.process.pid)}

    def __enter__(self) -> Life:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def new_lines(self) -> list[str]:
        """What it has printed since the last call, whole lines."""
        with self._log.open("rb") as stream:
            stream.seek(self._read)
            data = stream.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        return lines

    def family(self) -> list[psutil.Process]:
        """All its processes that live, those included whose parents have ended since they were seen."""
        for parent in list(self._members.values()):
            with contextlib.suppress(psutil.Error):
                self._members |= {child.pid: child for child in parent.children(recursive=True)}
        self._members = {pid: each for pid, each in self._members.items() if lives(each)}
        return list(self._members.values())

    def kill(self) -> None:
        """All of them, and nobody else's: psutil compares times of birth."""
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
        """Its exit code. Every line is given to `hear` as it comes, and `look` is called several times a second. Raises SoakError where it
        prints no step for so long."""
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
    """The step whose line of progress this is.

    >>> step_of("step 12/5000  reward 0.5"), step_of("resuming at step 12")
    (12, None)
    """
    found = STEP.match(line)
    return int(found[1]) if found else None


def command_of(process: psutil.Process) -> str:
    """Of a process that may end meanwhile; its beginning."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:120] or process.name()
    return f"process {process.pid}"
