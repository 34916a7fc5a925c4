"""vLLM's workers on CPU, forked with the imports of their engine's process: started anew, as vLLM does it, each makes them again,
which is most of what the start of an engine of several processes costs.

The fork server is multiprocessing's own, made as a fork of the engine's process while that has imports and one thread. It
unpickles what it receives, so its socket, whose name every user of the machine sees, hears this user alone.
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

VARIABLE = "MRL_TEST_FORK_VLLM"
"""In the environment of an engine's process whose workers are to be forked."""
_PR_SET_NAME = 15
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""


class OwnUserSocket(socket.socket):
    """A Unix socket that accepts processes of this user only."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept. ConnectionAbortedError, which multiprocessing's server passes over, if another user has connected."""
        connection, address = super().accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            connection.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, f"user {uid} has connected")
        return connection, address


def stand_by() -> None:
    """Make the server, and let vLLM's executors of this process start their workers by it; it ends with this process and with what
    it forked.

    Raises:
        RuntimeError: Other threads run.
    """
    fork_server()
    from vllm.v1.executor import multiproc_executor  # starts a thread

    multiproc_executor.get_mp_context = _Context  # type: ignore[assignment]


def fork_server() -> None:
    """Make this process's fork server of multiprocessing a fork of it."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads} threads run, and one of them may hold a lock that a fork would keep")
    address = f"\0mrl-workers-{os.getpid()}-{secrets.token_hex(8)}"  # without a file, which one that is killed would leave
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
        )  # vLLM's setproctitle finds no place in a fork
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode())
        plugin.end_with_engine()  # it was imported in a process that is no worker
        super().run()


class _Context(ForkServerContext):
    Process = _Worker
