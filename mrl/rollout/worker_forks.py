"""vLLM's workers on CPU, forked with the imports of their engine's process: started anew, as vLLM does it, each makes them again,
which is most of what the start of an engine of several processes costs.

The fork server is multiprocessing's own, made as a fork of the engine's process while that has imports and one thread. It
unpickles what it receives, so its socket and its clients' ask first who is at the other end.
On GPUs, and where none stands by, vLLM's way is left alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import socket
import struct
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import SimpleNamespace
from typing import Any

VARIABLE = "MRL_FORK_WORKERS"
"""In the environment of an engine's process that a fork server is to stand by."""
_PR_SET_NAME = 15


class OwnUserSocket(socket.socket):
    """A Unix socket that connects to processes of this user, and accepts those of this user, only: an abstract name is seen by
    every user of the machine, and belongs to whoever takes it first."""

    def connect(self, address: Any) -> None:
        """Connect. ConnectionRefusedError if another user listens."""
        super().connect(address)
        if _peer_uid(self) != os.getuid():
            raise ConnectionRefusedError(f"user {_peer_uid(self)} listens at {address!r}")

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept. ConnectionAbortedError, which multiprocessing's server passes over, if another user has connected."""
        connection, address = super().accept()
        if (uid := _peer_uid(connection)) != os.getuid():
            connection.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, f"user {uid} has connected")
        return connection, address


def _peer_uid(connection: socket.socket) -> int:
    credentials = struct.Struct("3i")  # pid, uid, gid
    return credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[
        1
    ]


def stand_by() -> None:
    """Makes the server, and lets vLLM's executors of this process start their workers by it; it ends with this process and
    with what it forked. RuntimeError where other threads run."""
    fork_server()
    from vllm.v1.executor import multiproc_executor  # starts a thread

    multiproc_executor.get_mp_context = _Context  # type: ignore[assignment]


def fork_server() -> None:
    """Make this process's fork server of multiprocessing a fork of it."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads} threads run, and one of them may hold a lock that a fork would keep")
    address = f"\0mrl-workers-{os.getpid()}-{secrets.token_hex(8)}"
    alive_end, alive = os.pipe()
    forkserver.socket = SimpleNamespace(socket=OwnUserSocket, AF_UNIX=socket.AF_UNIX)  # type: ignore[attr-defined]
    with OwnUserSocket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if (pid := os.fork()) == 0:
            os.close(alive)
            try:
                forkserver.main(listener.detach(), alive_end, [])
            finally:
                os._exit(0)
    os.close(alive_end)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, pid


class _Worker(ForkServerProcess):
    """Has the environment of the process that starts it, as one that is started anew would."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._variables = dict(os.environ)

    def run(self) -> None:
        import mrl.resharding.vllm.plugin as plugin

        for name in os.environ.keys() - self._variables.keys():
            del os.environ[name]
        os.environ.update(self._variables)
        title = self.name.replace(
            "VllmWorker", "VLLM::Worker"
        )  # as vLLM's, whose setproctitle finds no place in a fork
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode())
        plugin.end_with_engine()  # it was imported in a process that is no worker
        super().run()


class _Context(ForkServerContext):
    Process = _Worker
