"""How the processes of this machine are started and ended: words, environment, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from mrl.own_code import child_path


def module_words(module: str, *words: str) -> list[str]:
    """Return the command that runs a module with this Python, whose working folder comes last where modules are looked for."""
    return [sys.executable, "-P", "-m", module, *words]


def lifeline_words(command: Sequence[str]) -> list[str]:
    """Return a command that becomes this one and ends with the thread that starts it."""
    return module_words("mrl.processes.lifeline", str(os.getpid()), *command)


def child_environment() -> dict[str, str]:
    """Return the environment of a process that reads users' modules: this one's, with its import path, and one thread."""
    return {**os.environ, **child_path(), "OMP_NUM_THREADS": "1"}


def wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for a process that has reason to end and kill it after so many seconds; return its status."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def terminate_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Ask processes to end, and kill those that have not after so many seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        wait_or_kill(process, deadline - time.monotonic())


def kill_session(pid: int) -> None:
    """Kill the process group that a process leads, as far as it is there and this user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def exit_code(status: int) -> int:
    """Return the exit code that a shell gives for a process's status, negative for a signal's number."""
    return 128 - status if status < 0 else status
