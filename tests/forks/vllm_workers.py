"""vLLM's CPU workers, forked with their engine's imports, which otherwise are most of its start time.

multiprocessing's fork server is a fork of the engine's process, made while that has one thread. It unpickles
what it receives, and any user sees its socket's name, so it accepts this user only.
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
"""Variable of an engine's process whose workers are forked."""
_PR_SET_NAME = 15
_CREDENTIALS = struct.Struct("3i")


class OwnUserSocket(socket.socket):
    """A Unix socket that accepts processes of this user only."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection of this user; others raise ConnectionAbortedError, which the server ignores."""
        connection, address = super().accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            connection.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, f"user {uid} has connected")
        return connection, address


def stand_by() -> None:
    """Make the server of vLLM's executors; it ends with this process and with its forked ones.

    Raises:
        RuntimeError: Other threads run.
    """
    fork_server()
    from vllm.v1.executor import multiproc_executor  # starts a thread

    multiproc_executor.get_mp_context = _Context  # type: ignore[assignment]


def fork_server() -> None:
    """Fork this process to make its multiprocessing fork server."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads} threads run, and one of them may hold a lock that a fork would keep")
    address = f"\0mrl-workers-{os.getpid()}-{secrets.token_hex(8)}"  # abstract: no file stays
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
    """Has the environment of the process that starts it, like a new process."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._variables = dict(os.environ)

    def run(self) -> None:
        import mrl.resharding.vllm.plugin as plugin

        for name in os.environ.keys() - self._variables.keys():
            del os.environ[name]
        os.environ.update(self._variables)
        # vLLM's setproctitle does not find its place in a fork
        title = self.name.replace("VllmWorker", "VLLM::Worker")
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode())
        plugin.end_with_engine()  # it was imported in a process that is no worker
        super().run()


class _Context(ForkServerContext):
    Process = _Worker
