"""Runs `mrl` as a user does, with a deadline, and checks what is left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from tests.forks.servers import ENVIRONMENT, ForkServers, shared

SEGMENT = re.compile(r"/dev/shm/\S+")
CGROUPS = "/sys/fs/cgroup"
ROOT = Path(__file__).parents[2]


class Command:
    """A running `mrl` command; its output goes to a file."""

    def __init__(
        self,
        *words: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
        folder: Path = ROOT,
        alone: bool = False,
    ) -> None:
        """`under`: a command that prepares a place and then executes `mrl`; `alone`: without fork servers."""
        self.log = log
        self.started = time.monotonic()
        self._file = log.open("w")
        self._segments: set[str] = set()
        self._looked = 0.0
        self.named_at = float("inf")
        """Time (time.time) at which the line with the cause of its failure was seen."""
        is_alone = alone or words[0] != "train"
        self._servers: ForkServers | None = None if is_alone else shared()
        offer = {} if self._servers is None else self._servers.offer
        program = "mrl.cli" if self._servers is None else "tests.forks.program"
        self.process = subprocess.Popen(
            [*under, sys.executable, "-m", program, *words],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, **offer, **(environment or {})},
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )
        self._family: dict[int, float] = {}

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Return its living descendants, also after the parent has ended."""
        born = [] if self._servers is None else self._servers.forked()
        if psutil.pid_exists(self.process.pid):
            born += psutil.Process(self.process.pid).children(recursive=True)
        for child in born:
            self._family.setdefault(child.pid, child.create_time())
        alive = []
        for pid, started in self._family.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.NoSuchProcess:
                continue
        self._remember_segments(alive)
        return alive

    def _remember_segments(self, processes: list[psutil.Process]) -> None:
        """Collect the names in /dev/shm that the family has mapped, at most once a second."""
        if time.monotonic() - self._looked < 1.0:
            return
        self._looked = time.monotonic()
        for process in processes:
            with contextlib.suppress(OSError):
                self._segments |= set(SEGMENT.findall(Path(f"/proc/{process.pid}/maps").read_text()))

    def worker(self, log: Path) -> psutil.Process:
        """Return the process that writes a worker's log file."""
        path = str(log.resolve())
        for child in self.family():
            with contextlib.suppress(psutil.Error):
                if "ray::" in " ".join(child.cmdline()) and any(f.path == path for f in child.open_files()):
                    return child
        raise AssertionError(f"no process of the run has {path} open")

    def wait_for(self, text: str, *, seconds: float) -> None:
        self.wait_until(lambda: text in self.output, seconds=seconds, name=repr(text))

    def wait_until(self, condition: Callable[[], bool], *, seconds: float, name: str = "condition") -> None:
        """Wait until the condition is true; remember the family meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before {name}:\n{self.output[-3000:]}"
            )
            assert time.monotonic() < deadline, f"no {name} after {seconds} s:\n{self.output[-3000:]}"
            self.family()
            time.sleep(0.1)

    def send(self, number: signal.Signals) -> None:
        self.family()
        self.process.send_signal(number)

    def wait(self, *, seconds: float) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.output[-3000:]}"
            self.family()
            self._look_for_name()
            time.sleep(0.3)
        self._look_for_name()
        self._file.close()
        return self.process.returncode

    def _look_for_name(self) -> None:
        if self.named_at == float("inf") and re.search(
            r"^(mrl: |\w+: .*; ending the workers)", self.output, re.MULTILINE
        ):
            self.named_at = time.time()

    def assert_nothing_left(self, *, seconds: float = 180.0) -> float:
        """Wait until no process or session folder of the command is left; return the seconds it took."""
        start = time.monotonic()
        while (alive := self.family()) and time.monotonic() - start < seconds:
            time.sleep(0.2)
        assert not alive, f"left behind: {[(p.pid, ' '.join(p.cmdline())[:80]) for p in alive]}"
        return time.monotonic() - start

    def assert_no_segment_left(self) -> None:
        left = sorted(name for name in self._segments if os.path.exists(name))
        assert not left, f"shared memory left behind: {left}"

    def cgroups(self) -> list[str]:
        """Return the cgroups that sandboxes of its processes made and left."""
        named = re.compile(rf"mrl-({'|'.join(map(str, [self.process.pid, *self._family]))})-\d+")
        folders = [folder for folder, _, _ in os.walk(CGROUPS) if named.fullmatch(os.path.basename(folder))]
        return sorted(folders)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill exactly what this command started, for the case that the test failed."""
        for process in self.family():
            process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()


def run(*words: str, log: Path, seconds: float = 400.0, **options: Any) -> str:
    """Run a Command to its end and return its output; raise AssertionError unless it exits with 0."""
    with Command(*words, log=log, **options) as command:
        code = command.wait(seconds=seconds)
        assert code == 0, f"exit {code}:\n{command.output[-4000:]}"
        command.assert_nothing_left()
        return command.output
