"""Processes that sit exams: `python -m mrl.rewards.code.sitting DESCRIPTOR`.

consumes      on the socket of that descriptor: one end of a connection for each exam
produces      a forked process for each, which reads its exam, then asks and concludes over that connection
waits for     the next exam, the end of a process, and the close of a connection's other end: then it kills its process
never does    more than one thing at once: it has no threads, so that forking is safe, whoever it works for

A process that dies without a result is told to the other end with its status. All end with the socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from mrl.rewards.code.exam import Channel, Exam
from mrl.rewards.code.outcome import Outcome


def sit(connection: Connection) -> NoReturn:
    """Read an exam and its limits, and sit it."""
    channel = Channel(connection)
    try:
        connection.send_bytes(json.dumps({"pid": os.getpid()}).encode())
        exam: Exam
        exam, memory_bytes, cpu_seconds = pickle.loads(connection.recv_bytes())
        _limit(memory_bytes, cpu_seconds)
        exam.sit(channel)
    except MemoryError:
        channel.conclude(Outcome.MEMORY_LIMIT, "in the comparison, with what was returned")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Memory beyond what the interpreter has, and processor time: at its end SIGXCPU says why, which an equal hard limit would
    make SIGKILL."""
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + memory_bytes, held + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._sitting: dict[int, tuple[int, Connection]] = {}
        """Process and connection, by the process' descriptor."""

    def serve(self) -> None:
        while True:
            descriptor, _ = self._poll.poll()[0]  # one at a time: it may close others that are due
            if descriptor in self._sitting:
                self._reap(descriptor)
            elif descriptor != self._control.fileno():
                self._abandon(descriptor)
            elif not self._accept():
                return

    def _accept(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            for pid, _ in self._sitting.values():
                os.kill(pid, signal.SIGKILL)
            return False
        (descriptor,) = descriptors
        pid = os.fork()
        if pid == 0:
            os.dup2(descriptor, 3)
            os.closerange(4, 2**16)
            sit(Connection(3))
        process = os.pidfd_open(pid)
        self._sitting[process] = (pid, Connection(descriptor))
        self._poll.register(process, select.POLLIN)
        self._poll.register(descriptor, select.POLLRDHUP)
        return True

    def _abandon(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        for pid, connection in self._sitting.values():
            if connection.fileno() == descriptor:
                os.kill(pid, signal.SIGKILL)

    def _reap(self, process: int) -> None:
        pid, connection = self._sitting.pop(process)
        _, status = os.waitpid(pid, 0)
        self._poll.unregister(process)
        os.close(process)
        with contextlib.suppress(KeyError):
            self._poll.unregister(connection.fileno())
        with contextlib.suppress(OSError), connection:
            if status:
                died = json.dumps({"died": os.waitstatus_to_exitcode(status), "passed": 0})
                connection.send_bytes(died.encode())


def main() -> None:
    import numpy  # noqa: F401 tests of tasks use it: imported once, not in every process

    _Server(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
