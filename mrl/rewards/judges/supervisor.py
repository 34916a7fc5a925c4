"""Supervise one server: a thread of this process restarts it when it exits.

The server does not outlive this process: the kernel kills its first process, and each of a server's processes
exits with the one that started it (mrl/rollout/serve.py).
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
"""Time for the thread to notice that a server is late, and to stop it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerJob:
    """Command of a server, and how it is supervised."""

    name: str
    """Name in errors and logs."""
    command: Sequence[str]
    """Command line of the server, which dies with the thread that starts it."""
    environment: Mapping[str, str]
    """Environment variables in addition to this process's."""
    socket: str
    """Unix socket for GET /health. Its folder is the server's alone and is removed at the end, with all files
    that a killed server left in it."""
    log: Path
    """File that the server's output is appended to."""
    restarts: int
    start_deadline_seconds: float


class ServerSupervisor:
    """Owner of a job's server: starts it, restarts it when it exits, and stops it in `close`."""

    def __init__(self, job: ServerJob) -> None:
        self._job = job
        self.restarts = 0
        self._lost = ""
        self._ready, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._supervise, daemon=True, name=job.name)
        self._thread.start()

    def ready(self) -> None:
        """Wait until the server is healthy. Raises ConfigError with its last error if it does not start."""
        self._ready.wait(self._job.start_deadline_seconds + _CLOSE_SECONDS)
        if self._lost or not self._ready.is_set():
            raise ConfigError(f"{self._job.name}: {self._lost or 'no answer'}; its log is {self._job.log}")

    def check(self) -> None:
        """Raise WorkerLost if the server is gone for good."""
        if self._lost:
            raise WorkerLost(
                f"the engine {self._job.name} is gone: {self._lost} (restarted {self.restarts} times); its "
                f"log is {self._job.log}; start the run again to resume from its last checkpoint"
            )

    def close(self) -> None:
        """Stop the server."""
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
                _log.warning("%s: %s; restarting it (restart %d)", self._job.name, fault, self.restarts)
        except OSError as error:
            self._lost = f"it cannot be started: {error}"
        finally:
            shutil.rmtree(os.path.dirname(self._job.socket), ignore_errors=True)
            self._ready.set()

    def _watch(self, server: subprocess.Popen[bytes]) -> str:
        """Return why the server failed; empty if it was asked to stop."""
        job, start = self._job, time.monotonic()
        while not _answers(job.socket):
            if self._closing.wait(_TICK_SECONDS):
                return ""
            if server.poll() is not None:
                return (
                    f"no answer: it ended with status {server.returncode} before it served; "
                    f"{_last_error(job.log)}"
                )
            if time.monotonic() - start > job.start_deadline_seconds:
                return f"no answer within start_deadline_seconds = {job.start_deadline_seconds:g}"
        _log.info("%s is ready after %.1f s", job.name, time.monotonic() - start)
        self._ready.set()
        while server.poll() is None:
            if self._closing.wait(_TICK_SECONDS):
                return ""
        return f"it ended with status {server.returncode}"

    @contextlib.contextmanager
    def _server(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the server's process in its own session for the length of the block."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._job.socket)  # left by the previous server
        with open(self._job.log, "ab") as output:
            server = subprocess.Popen(
                self._job.command,
                env={**os.environ, **self._job.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C goes to the driver only
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
    """Return True if the server at this socket reports that it is healthy."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_HEALTH_SECONDS)
            connection.connect(path)
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return connection.makefile("rb").readline().split()[1:2] == [b"200"]
    except OSError:
        return False


def _last_error(log: Path) -> str:
    """Return the log's last error line, else its last line."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return ascii((errors or lines or ["its log is empty"])[-1][:300])
