"""One server, watched by a thread of this process that starts it again when it ends.

The server does not outlive this process: the kernel ends its first process, and each process of a server ends with the one that
started it (mrl/rollout/serve.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mrl.errors import ConfigError, WorkerLost
from mrl.processes.start import kill_session

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.2
_END_SECONDS = 5.0
_HEALTH_SECONDS = 5.0
_CLOSE_SECONDS = _HEALTH_SECONDS + _END_SECONDS + 5.0
"""For the thread to find that a server is late, and to end it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is served."""

    name: str
    """For errors and logs."""
    command: Sequence[str]
    """Words that the server is started with; it dies with the thread that starts it."""
    environment: Mapping[str, str]
    """Besides this process's own."""
    socket: str
    """Unix socket that it answers GET /health on, in a folder of its own, which is removed at the end with what a killed server leaves
    there."""
    log: Path
    """File that the server's words are added to."""
    restarts: int
    start_deadline_seconds: float


class ServerSupervisor:
    """Starts the server of a job, again when it ends; `close` ends it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.restarts = 0
        self._lost = ""
        self._ready, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._supervise, daemon=True, name=job.name)
        self._thread.start()

    def ready(self) -> None:
        """Wait for the first answer. Raises ConfigError with the server's words if it does not come up."""
        self._ready.wait(self._job.start_deadline_seconds + _CLOSE_SECONDS)
        if self._lost or not self._ready.is_set():
            raise ConfigError(f"{self._job.name}: {self._lost or 'no answer'}; its log is {self._job.log}")

    def check(self) -> None:
        """Raise WorkerLost if the server is gone for good."""
        if self._lost:
            raise WorkerLost(
                f"the engine {self._job.name} is gone: {self._lost} (started again {self.restarts} times); its log is "
                f"{self._job.log}; the run goes on from its last checkpoint when it is started again"
            )

    def close(self) -> None:
        """End the server."""
        self._closing.set()
        self._thread.join()

    def _supervise(self) -> None:
        try:
            while True:
                with self._server() as server:
                    fault = self._watch(server)
                if self._closing.is_set():
                    return
                if fault.startswith("no answer") or self.restarts == self._job.restarts:
                    self._lost = fault
                    return
                self.restarts += 1
                _log.warning("%s: %s; it is started again (%d)", self._job.name, fault, self.restarts)
        except OSError as error:
            self._lost = f"it cannot be started: {error}"
        finally:
            shutil.rmtree(os.path.dirname(self._job.socket), ignore_errors=True)
            self._ready.set()

    def _watch(self, server: subprocess.Popen[bytes]) -> str:
        """Return why the server is of no use any more; empty if it is to end."""
        job, begun = self._job, time.monotonic()
        while not _answers(job.socket):
            if self._closing.wait(_TICK_SECONDS):
                return ""
            if server.poll() is not None:
                return f"no answer: it ended with status {server.returncode} before it served; {_last_words(job.log)}"
            if time.monotonic() - begun > job.start_deadline_seconds:
                return f"no answer within start_deadline_seconds = {job.start_deadline_seconds:g}"
        _log.info("%s answers after %.1f s", job.name, time.monotonic() - begun)
        self._ready.set()
        while server.poll() is None:
            if self._closing.wait(_TICK_SECONDS):
                return ""
        return f"it ended with status {server.returncode}"

    @contextlib.contextmanager
    def _server(self) -> Iterator[subprocess.Popen[bytes]]:
        """The server's process in a session of its own, which ends with the block."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._job.socket)  # of the server before
        with open(self._job.log, "ab") as output:
            server = subprocess.Popen(
                self._job.command,
                env={**os.environ, **self._job.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is the driver's
            )
        try:
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(server.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_END_SECONDS)
            kill_session(server.pid)
            server.wait()


def _answers(path: str) -> bool:
    """Return True if the server at this socket says that it is healthy."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_HEALTH_SECONDS)
            connection.connect(path)
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return connection.makefile("rb").readline().split()[1:2] == [b"200"]
    except OSError:
        return False


def _last_words(log: Path) -> str:
    """The last line of an error in the log."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return ascii((errors or lines or ["it said nothing"])[-1][:300])
