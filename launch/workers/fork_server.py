"""Processes that import Megatron or vLLM once, and fork the workers of a run that need it: imports are most of what a start on
CPUs costs, and they go on while the configuration is checked and Ray starts.

`ForkServers` is the driver's side. Its process imports torch and forks one server for each kind of worker, which imports the
rest and then forks for every client (launch/workers/fork_client.py, the Python of Ray's workers). It forks while it has one
thread only, and imports start none; otherwise, where it sees a GPU, or when it is gone, workers start by themselves. For the
driver's machine only: nodes that others start know nothing of it.

Servers may also be kept for many runs, whose environment names them (`STANDING`): a run takes those whose imports would be its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import json
import os
import pickle
import runpy
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from mrl.config.root import Config
from mrl.own_code import child_path
from mrl.rewards.pool.lifeline import die_with_parent
from mrl.rollout import worker_forks
from mrl.rollout.worker_forks import OwnUserSocket

CLIENT = Path(__file__).with_name("fork_client.py")
PRELOADS = {"trainer": "mrl.training.preload", "engine": "mrl.rollout.preload"}
"""Kind of worker -> the module whose `preload(config)` makes its imports, under what its `variables(config)` says."""
STANDING = "MRL_FORK_SERVERS"
"""In a run's environment: what `ForkServers.standing` says of servers that somebody keeps."""
GIVEN_ANEW = ("MRL_", "RAY_", "PYTEST_", "PYTHONBREAKPOINT", "TMPDIR", "PWD", "OLDPWD", "SHLVL")
"""How variables begin that no import of a server reads; like all others, a worker has its client's."""
CLIENT_SECONDS = 60.0
"""A client that says nothing for so long is left alone."""
CONNECT_SECONDS = 5.0
"""For the kernel to take a connection: a server that listens need not answer for that."""


class ForkServers:
    """The fork servers of a run, from now until `close`; workers that they forked do not end with them."""

    def __init__(
        self,
        config: Config,
        *,
        environment: Mapping[str, str],
        log_folder: Path,
        preloads: Mapping[str, str] = PRELOADS,
    ) -> None:
        """`environment`: of the workers, beside this process's own."""
        self._made_for = config, environment, preloads
        self._process: subprocess.Popen[bytes] | None = None
        if STANDING in os.environ:
            kept = json.loads(os.environ[STANDING])
            if kept["imports"] == imports(*self._made_for):
                self._names: dict[str, str] = kept["names"]
                return
        secret = secrets.token_hex(8)
        self._names = {kind: f"mrl-fork-{os.getpid()}-{secret}-{kind}" for kind in preloads}
        sockets = {kind: _listening(name) for kind, name in self._names.items()}
        served = {kind: (each.fileno(), preloads[kind]) for kind, each in sockets.items()}
        log_folder.mkdir(parents=True, exist_ok=True)
        with (log_folder / "fork-server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(os.getpid()), json.dumps(served)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **child_path(), **environment},
                pass_fds=[each.fileno() for each in sockets.values()],
                start_new_session=True,  # Ctrl-C is for the driver, which lets workers finish their step
            )
        for each in sockets.values():
            each.close()  # a client of a server that ended is refused, and does not wait
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(config, self._process.stdin)
            self._process.stdin.flush()

    def python(self, kind: str) -> str:
        """The command that stands for Python where a worker of a kind ("trainer", "engine") is started; Python itself if the
        kind's server has ended."""
        client = ["-I", "-S", str(CLIENT), self._names[kind]]
        with contextlib.suppress(OSError), _connected(self._names[kind]):
            return shlex.join([sys.executable, *client])
        return shlex.join([sys.executable])

    @property
    def pid(self) -> int | None:
        """Of the process that all servers are children of; None where others keep them."""
        return self._process.pid if self._process is not None else None

    def standing(self) -> str:
        """The value of `STANDING` for runs that may take these servers."""
        return json.dumps({"imports": imports(*self._made_for), "names": self._names})

    def wait(self, deadline_seconds: float) -> None:
        """Until all servers have made their imports, or ended; Ray gives up on a worker that does not report in a minute."""
        for name in self._names.values():
            with contextlib.suppress(OSError), _connected(name) as server:
                server.settimeout(deadline_seconds)
                server.shutdown(socket.SHUT_WR)
                server.recv(1)

    def close(self) -> None:
        """Ends the servers, which hold nothing; those that others keep stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def imports(config: Config, environment: Mapping[str, str], preloads: Mapping[str, str]) -> str:
    """A digest of all that what is imported depends on: Python, the folder, the environment, the configuration's part in it; and
    of the kernel's namespaces, which say what a worker sees of files, processes and networks."""
    own = {n: v for n, v in {**os.environ, **environment}.items() if not n.startswith(GIVEN_ANEW)}
    said = {kind: importlib.import_module(module).variables(config) for kind, module in preloads.items()}
    spaces = {path.name: os.readlink(path) for path in Path("/proc/self/ns").iterdir()}
    told = [sys.executable, os.getcwd(), own, said, spaces]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What a client was started as."""

    words: list[str]
    """A script and its arguments."""
    environment: dict[str, str]
    folder: str
    """Its working directory."""
    oom_score: str
    streams: list[int]
    """Descriptors of standard input, output and error."""
    said: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables that the imports were made under, in the place of the client's."""

    def run(self) -> None:
        """Becomes what the client was: this process runs the script as its main program."""
        import numpy as np

        gc.enable()
        os.setpgid(0, 0)  # Ray ends the group of a worker that died, and the others' is the server's
        np.random.seed()  # Python's own generator is seeded by the fork
        for target, stream in enumerate(self.streams):
            os.dup2(stream, target)
            os.close(stream)
        os.environ.clear()
        os.environ.update(self.environment | self.said)
        os.chdir(self.folder)
        Path("/proc/self/oom_score_adj").write_text(self.oom_score)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if worker_forks.VARIABLE in self.environment:
            worker_forks.stand_by()
        sys.argv[:] = self.words
        sys.path.insert(0, str(Path(self.words[0]).parent))
        runpy.run_path(self.words[0], run_name="__main__")


def _listening(name: str) -> socket.socket:
    listener = OwnUserSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(128)
    return listener


def _connected(name: str) -> socket.socket:
    """A connection to this user's server of a name. OSError if there is none."""
    server = OwnUserSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.settimeout(CONNECT_SECONDS)
        server.connect("\0" + name)
    except OSError:
        server.close()
        raise
    return server


def serve(listener: socket.socket, module: str, config: Config) -> Request:
    """Makes a kind's imports and forks for each client; returns in the processes that it forked, and nowhere else."""
    before = dict(os.environ)
    sys.modules["ray"] = None  # type: ignore[assignment] its import reads of the environment which raylet and job it is for
    importlib.import_module(module).preload(config)
    del sys.modules["ray"]
    said = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()  # the workers' collectors leave alone what they share, and so it stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:  # another user's
            continue
        with connection:
            request = _received(connection)
            if request is None:
                continue
            if (threads := len(os.listdir("/proc/self/task"))) > 1:
                sys.exit(f"{module}: {threads} threads run after the imports; workers start by themselves")
            if not _has_left(connection):
                if os.fork() == 0:
                    listener.close()
                    return dataclasses.replace(request, said=said)
                with contextlib.suppress(OSError):
                    connection.sendall(b"+")
            for stream in request.streams:
                os.close(stream)


def _has_left(connection: socket.socket) -> bool:
    """Return True if a client gave up waiting, and starts by itself."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False


def _received(connection: socket.socket) -> Request | None:
    """A client's request; None from one that ended or only asked whether the server is there."""
    connection.settimeout(CLIENT_SECONDS)
    try:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        with connection.makefile("rb") as file:
            data = file.read(int.from_bytes(head, "big"))
        return Request(**json.loads(data), streams=streams)
    except (OSError, ValueError):
        return None


def main(served: Mapping[str, tuple[int, str]], owner: IO[bytes]) -> Request | None:
    """The process of `ForkServers`: servers as its children, which end with it, until its owner is gone. Returns a request in
    the workers that they fork. `served`: kind -> descriptor of its listening socket, its module; `owner`: has the
    configuration, and ends with its process."""
    config, own = pickle.load(owner), os.getpid()
    gc.disable()  # thousands of modules leave next to nothing to collect, and looking for it is a fifth of their imports
    import torch

    if torch.cuda.device_count():
        return None  # what an import takes of a device would be missing where an engine measures it
    listeners = {kind: OwnUserSocket(fileno=number) for kind, (number, _) in served.items()}
    for kind, (_, module) in served.items():
        if os.fork() == 0:
            die_with_parent(own)
            for other in set(listeners) - {kind}:
                listeners[other].close()
            return serve(listeners[kind], module, config)
    for listener in listeners.values():
        listener.close()
    owner.read()
    os._exit(0)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if (_request := main(json.loads(sys.argv[2]), sys.stdin.buffer)) is not None:
        _request.run()
