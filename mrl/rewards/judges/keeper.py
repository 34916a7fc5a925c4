"""Keeps one server: starts it, says when it answers, starts it again when it ends, and ends with the process that asked for it.

`python -m mrl.rewards.judges.keeper JOB`, with the job as JSON. Standard input is a pipe whose end is the order to end; on
standard output goes a line of JSON for each event: {"pid"} of a server's session, {"ready": seconds}, {"ended": why}
before it is started again, {"lost": why} before the keeper ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mrl.processes.start import kill_session

TICK_SECONDS = 0.2
END_SECONDS = 5.0
HEALTH_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is kept."""

    command: list[str]
    """Words that the server is started with; the keeper's pid is put in the place of "PARENT"."""
    environment: dict[str, str]
    """Beside the keeper's own."""
    socket: str
    """Unix socket that it answers GET /health on, in a folder of its own, which is removed at the end with what a killed server leaves
    there."""
    log: str
    """File that the server's words are added to."""
    restarts: int
    start_deadline_seconds: float


class _AskedToEnd(Exception):
    """The keeper is to end."""


def main(job: Job) -> int:
    """0 where it was asked to end; 1 where the server ended too often or did not come up."""
    try:
        for number in range(job.restarts + 1):
            with _server(job) as server:
                tell(pid=server.pid)
                why = _watch(job, server)
            if why.startswith("no answer") or number == job.restarts:
                tell(lost=why)
                return 1
            tell(ended=why)
    except _AskedToEnd:
        return 0
    finally:
        shutil.rmtree(os.path.dirname(job.socket), ignore_errors=True)
    return 1


def _watch(job: Job, server: subprocess.Popen[bytes]) -> str:
    """Why the server is of no use any more, after a word when it first answered."""
    begun = time.monotonic()
    while not _answers(job.socket):
        _tick()
        if server.poll() is not None:
            return f"no answer: it ended with status {server.returncode} before it served; {_last_words(job.log)}"
        if time.monotonic() - begun > job.start_deadline_seconds:
            return f"no answer within start_deadline_seconds = {job.start_deadline_seconds:g}"
    tell(ready=time.monotonic() - begun)
    while server.poll() is None:
        _tick()
    return f"it ended with status {server.returncode}"


@contextlib.contextmanager
def _server(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process in a session of its own, which ends with the block."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(job.socket)  # of the server before
    words = [str(os.getpid()) if word == "PARENT" else word for word in job.command]
    with open(job.log, "ab") as output:
        server = subprocess.Popen(
            words,
            env={**os.environ, **job.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield server
    finally:
        _end_session(server.pid, lambda: server.poll() is None)
        server.wait()


def _end_session(pid: int, is_there: Callable[[], bool]) -> None:
    """Asks a server to end, and kills its process group after some seconds."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while is_there() and time.monotonic() < deadline:
            time.sleep(0.05)
    kill_session(pid)


def _tick() -> None:
    """Waits a moment. Raises _AskedToEnd at the end of the standard input."""
    if select.select([0], [], [], TICK_SECONDS)[0] and not os.read(0, 1):
        raise _AskedToEnd


def _answers(path: str) -> bool:
    """Return True if the server at this socket says that it is healthy."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(HEALTH_SECONDS)
            connection.connect(path)
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return connection.makefile("rb").readline().split()[1:2] == [b"200"]
    except OSError:
        return False


def _last_words(log: str) -> str:
    """The last line of an error in the log."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return ascii((errors or lines or ["it said nothing"])[-1][:300])


def tell(**event: Any) -> None:
    """One line for the process that asked; it may be gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    raise SystemExit(main(Job(**json.loads(sys.argv[1]))))
