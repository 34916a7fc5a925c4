"""The fork servers' process (tests/forks/servers.py): imports torch and forks a server per kind of worker.

A server makes its kind's imports (tests/forks/imports.py), which start no threads, and then forks for every
client (tests/forks/client.py, the Python of Ray's workers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from mrl.processes.lifeline import die_with_parent
from tests.forks import vllm_workers

CLIENT_SECONDS = 60.0
"""Seconds after which a silent client is dropped."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A client's arguments, folder, descriptors and environment."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    oom_score: str
    streams: list[int]
    set_by_imports: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables of the imports, which replace the client's."""

    def run(self) -> None:
        """Become the client: run the script as the main program."""
        import numpy as np

        gc.enable()
        os.setpgid(0, 0)  # Ray ends the group of a worker that died, and the others' is the server's
        np.random.seed()  # Python's own generator is seeded by the fork
        for target, stream in enumerate(self.streams):
            os.dup2(stream, target)
            os.close(stream)
        os.environ.clear()
        os.environ.update(self.environment | self.set_by_imports)
        os.chdir(self.folder)
        Path("/proc/self/oom_score_adj").write_text(self.oom_score)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if vllm_workers.VARIABLE in self.environment:
            vllm_workers.stand_by()
        sys.argv[:] = self.words
        sys.path.insert(0, str(Path(self.words[0]).parent))
        runpy.run_path(self.words[0], run_name="__main__")


def serve(listener: socket.socket, kind: str, module: str) -> Request:
    """Make a kind's imports and fork for each client; return only in the forked processes."""
    before = dict(os.environ)
    sys.modules["ray"] = None  # type: ignore[assignment] its import reads of the environment which raylet and job it is for
    importlib.import_module(module).preload(kind)
    del sys.modules["ray"]
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()  # the workers' collectors leave alone what they share, and so it stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        with connection:
            request = received(connection)
            if request is None:
                continue
            if (threads := len(os.listdir("/proc/self/task"))) > 1:
                sys.exit(f"{kind}: {threads} threads run after the imports; workers start by themselves")
            if not has_left(connection):
                if os.fork() == 0:
                    listener.close()
                    return dataclasses.replace(request, set_by_imports=changed)
                with contextlib.suppress(OSError):
                    connection.sendall(b"+")
            for stream in request.streams:
                os.close(stream)


def has_left(connection: socket.socket) -> bool:
    """Return True if a client gave up and starts alone."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False


def received(connection: socket.socket) -> Request | None:
    """Return a client's request; None if it ended or only tested the connection."""
    connection.settimeout(CLIENT_SECONDS)
    try:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        with connection.makefile("rb") as file:
            data = file.read(int.from_bytes(head, "big"))
        return Request(**json.loads(data), streams=streams)
    except (OSError, ValueError):
        return None


def main(owner: int, served: Mapping[str, int], module: str) -> Request:
    """Fork a server per listening socket and wait for them; return requests in the forked workers."""
    die_with_parent(owner)
    pid = os.getpid()
    gc.disable()  # modules leave little garbage, and collection is a fifth of import time
    import torch  # noqa: F401

    listeners = {kind: socket.socket(fileno=number) for kind, number in served.items()}
    for kind in served:
        if os.fork() == 0:
            die_with_parent(pid)
            for other in set(listeners) - {kind}:
                listeners[other].close()
            return serve(listeners[kind], kind, module)
    for listener in listeners.values():
        listener.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]).run()
