"""Processes that die with their parent: reward workers, and the commands that a torchrun node runs.

`python -m mrl.processes.lifeline PARENT_PID COMMAND...` executes a command that dies with that parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; exit now if it already has.

    The request survives exec but not a change of user; then readers still end at EOF of their pipes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


@contextlib.contextmanager
def keeping_lifeline() -> Iterator[None]:
    """Keep `die_with_parent` while the process changes its user and changes it back, which ends it."""
    libc, number, parent = ctypes.CDLL(None), ctypes.c_int(), os.getppid()
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    try:
        yield
    finally:
        if number.value:
            libc.prctl(_PR_SET_PDEATHSIG, number.value, 0, 0, 0)
            if os.getppid() != parent:  # it ended meanwhile
                os.kill(os.getpid(), number.value)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make descendants whose parent ends this process's children meanwhile, which it can reap.

    Otherwise they wait for the machine's first process, which may reap nothing in a container; a process that
    nobody reaped still counts for cgroups and limits.
    """
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
