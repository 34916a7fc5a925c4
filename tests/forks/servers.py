"""Fork servers, which the tests of one process share: they import Megatron or vLLM once and fork the workers of the tests' runs,
because imports are most of what a run of a tiny model costs.

This is the tests' side of them; tests/forks/server.py is the process. A run whose imports would be others starts its workers by
itself.
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
"""Of every command of a test."""
VARIABLE = "MRL_TEST_FORK_SERVERS"
"""In the environment of a command whose workers these servers start: `ForkServers.offer`."""
GIVEN_ANEW = ("MRL_", "RAY_", "PYTEST_", "PYTHONBREAKPOINT", "TMPDIR", "PWD", "OLDPWD", "SHLVL")
"""How variables begin that no import of a server reads; like all others, a worker has its client's."""
READY_SECONDS = 240.0


class ForkServers:
    """The fork servers, from now until `close`; workers that they forked do not end with them."""

    def __init__(self, kinds: Sequence[str] = KINDS, *, module: str = "tests.forks.imports") -> None:
        """`module`: its `preload(kind)` makes the imports of a kind."""
        self.folder = Path(tempfile.mkdtemp(prefix="mrl-forks-"))  # this user's alone, with all sockets
        with contextlib.chdir(ROOT), mock.patch.dict(os.environ):
            os.environ.pop("MRL_SESSION", None)  # of a test's cluster, with which all that has it ends
            self._digest = digest(quickstart(), os.environ)
            os.environ.update(ENVIRONMENT | worker_environment(quickstart()))
            sockets = {kind: listening(str(self.folder / kind)) for kind in kinds}
            served = {kind: each.fileno() for kind, each in sockets.items()}
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
        for each in sockets.values():
            each.close()  # a client of a server that ended is refused, and does not wait

    @property
    def offer(self) -> dict[str, str]:
        """The variable of a command that is to find these servers."""
        return {VARIABLE: json.dumps({"digest": self._digest, "folder": str(self.folder)})}

    def forked(self) -> list[psutil.Process]:
        """Return what lives of all that they forked, and below."""
        found = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.ppid() != self._process.pid:  # a server
                    found.append(child)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def shared() -> ForkServers:
    """Start the servers of this process of tests, by the thread that all tests run in: they end with the thread that started them."""
    assert threading.current_thread() is threading.main_thread()
    return ForkServers()


def close() -> None:
    """End the shared servers if there are any."""
    if shared.cache_info().currsize:
        shared().close()
        shared.cache_clear()


def python(folder: Path, kind: str) -> str | None:
    """Return the command that stands for Python where a worker of a kind starts, once the server has its imports: Ray gives up on a
    worker that does not report within a minute. None if the server has ended."""
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
    """Let these servers, if their imports are a run's own, start the trainer ranks and engines of this process's runs."""
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
    """Return a digest of all that imports depend on: Python, the folder, the environment, the configuration's part in it, and the
    kernel's namespaces, which decide what a worker sees of files, processes and networks."""
    whole = {**environment, **ENVIRONMENT, **worker_environment(config)}
    own = {n: v for n, v in whole.items() if not n.startswith(GIVEN_ANEW)}
    spaces = {path.name: os.readlink(path) for path in Path("/proc/self/ns").iterdir()}
    parts = [sys.executable, os.getcwd(), own, variables(config), spaces]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
