"""Fork servers that import Megatron or vLLM once and fork the workers of the tests' runs.

Imports are most of the cost of a tiny run. tests/forks/server.py is the process, this the tests' side.
A run with other imports starts its workers alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from mrl.config.root import Config
from mrl.launch.commands.start_run import worker_environment
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.train_group import TrainGroup
from mrl.user_code import child_path
from tests.forks import vllm_workers
from tests.forks.imports import KINDS, quickstart, variables

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
VARIABLE = "MRL_TEST_FORK_SERVERS"
"""Variable of a command whose workers these servers start: `ForkServers.offer`."""
GIVEN_ANEW = ("MRL_", "RAY_", "PYTEST_", "PYTHONBREAKPOINT", "TMPDIR", "PWD", "OLDPWD", "SHLVL")
"""Prefixes of variables that no import reads; a worker gets its client's."""
READY_SECONDS = 240.0


class ForkServers:
    """The fork servers until `close`; workers that they forked live on."""

    def __init__(self, kinds: Sequence[str] = KINDS, *, module: str = "tests.forks.imports") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mrl-forks-"))  # this user's alone, with all sockets
        with contextlib.chdir(ROOT), mock.patch.dict(os.environ):
            os.environ.pop("MRL_SESSION", None)  # of a test's cluster, with which all that has it ends
            self._digest = digest(quickstart(), os.environ)
            os.environ.update(ENVIRONMENT | worker_environment(quickstart()))
            sockets = {kind: listening(str(self.folder / kind)) for kind in kinds}
            served = {kind: listener.fileno() for kind, listener in sockets.items()}
            with (self.folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "tests.forks.server",
                        str(os.getpid()),
                        json.dumps(served),
                        module,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **child_path()},
                    pass_fds=list(served.values()),
                )
        for listener in sockets.values():
            listener.close()  # a client of a server that ended is refused, and does not wait

    @property
    def offer(self) -> dict[str, str]:
        return {VARIABLE: json.dumps({"digest": self._digest, "folder": str(self.folder)})}

    def forked(self) -> list[psutil.Process]:
        """Return living processes that they forked, and their descendants."""
        processes = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.ppid() != self._process.pid:  # a server
                    processes.append(child)
        return processes

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def shared() -> ForkServers:
    """Start this process's servers in the main thread of the tests, with which they end."""
    assert threading.current_thread() is threading.main_thread()
    return ForkServers()


def close() -> None:
    if shared.cache_info().currsize:
        shared().close()
        shared.cache_clear()


def python(folder: Path, kind: str) -> str | None:
    """Return the command that replaces Python for a kind of worker; None if the server has ended.

    It waits for the server's imports, because Ray gives up on a silent worker after a minute."""
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(READY_SECONDS)
            server.connect(str(folder / kind))
            server.shutdown(socket.SHUT_WR)
            server.recv(1)
    except OSError:
        return None
    client = Path(__file__).with_name("client.py")
    return shlex.join([sys.executable, "-I", "-S", str(client), str(folder / kind)])


@contextlib.contextmanager
def starting_workers(offer: str) -> Iterator[None]:
    """Let these servers start this process's trainer ranks and engines if the imports match."""
    kept, before = json.loads(offer), dict(os.environ)
    usual = ActorGroup.runtime_env

    def runtime_env(group: ActorGroup[Any], values: Mapping[str, str]) -> dict[str, Any]:
        kind = {TrainGroup: "trainer", RolloutGroup: "engine"}.get(type(group))
        given = usual(group, values)
        if kind is None or digest(group._config, before) != kept["digest"]:
            return given
        if not (command := python(Path(kept["folder"]), kind)):
            return given
        if kind == "engine" and group._config.rollout.tp > 1:
            given["env_vars"][vllm_workers.VARIABLE] = "1"
        return given | {"py_executable": command}

    with mock.patch.object(ActorGroup, "runtime_env", runtime_env):
        yield


def listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    return listener


def digest(config: Config, environment: Mapping[str, str]) -> str:
    """Return a digest of all that imports depend on: Python, folder, environment, configuration.

    The kernel's namespaces count too; they decide which files, processes and networks a worker sees."""
    whole = {**environment, **ENVIRONMENT, **worker_environment(config)}
    kept = {n: v for n, v in whole.items() if not n.startswith(GIVEN_ANEW)}
    spaces = {path.name: os.readlink(path) for path in Path("/proc/self/ns").iterdir()}
    parts = [sys.executable, os.getcwd(), kept, variables(config), spaces]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
