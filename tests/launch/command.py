"""`mrl` as a user runs it: a process of its own with a deadline, and what is left of it afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


class Command:
    """A running `mrl` command; its output goes to a file."""

    def __init__(self, *words: str, log: Path) -> None:
        self.log = log
        self.started = time.monotonic()
        self._file = log.open("w")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mrl.cli", *words],
            cwd=ROOT,
            env=environment,
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )
        self._family: dict[int, float] = {}

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Everything it started that lives, grandchildren included, also after the parent is gone."""
        if psutil.pid_exists(self.process.pid):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._family.setdefault(child.pid, child.create_time())
        alive = []
        for pid, started in self._family.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.NoSuchProcess:
                continue
        return alive

    def wait_for(self, text: str, *, seconds: float) -> None:
        """Returns when the output holds the text; remembers the family on the way."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before {text!r}:\n{self.output[-3000:]}"
            )
            assert time.monotonic() < deadline, f"no {text!r} after {seconds} s:\n{self.output[-3000:]}"
            self.family()
            time.sleep(0.1)

    def send(self, number: signal.Signals) -> None:
        self.family()
        self.process.send_signal(number)

    def wait(self, *, seconds: float) -> int:
        """Exit code; the family is remembered while it runs."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.output[-3000:]}"
            self.family()
            time.sleep(0.1)
        self._file.close()
        return self.process.returncode

    def assert_nothing_left(self, *, seconds: float = 60.0) -> float:
        """Waits until no process and no session folder of the command is left; seconds it took."""
        start = time.monotonic()
        while (alive := self.family()) and time.monotonic() - start < seconds:
            time.sleep(0.2)
        assert not alive, f"left behind: {[(p.pid, ' '.join(p.cmdline())[:80]) for p in alive]}"
        return time.monotonic() - start

    def end(self) -> None:
        """For the end of a test that failed: kills exactly what this command started."""
        for process in self.family():
            process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()


def run(*words: str, log: Path, seconds: float = 240.0) -> str:
    """Runs to the end; the output. A non-zero exit is an assertion with the output's tail."""
    command = Command(*words, log=log)
    try:
        code = command.wait(seconds=seconds)
        assert code == 0, f"exit {code}:\n{command.output[-4000:]}"
        command.assert_nothing_left()
        return command.output
    finally:
        command.end()
