"""Start and end processes of this machine: command lines, environment, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mrl.user_code import child_path, search_path


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module with this Python, with the working folder last in sys.path."""
    return [sys.executable, "-P", "-m", module, *words]


def foreign_command(python: str, module: str, *words: str) -> list[str]:
    """Return the command that runs a module of mrl with the Python of another virtual environment.

    Its packages come first, then those of this Python. A variable could not have this order, and would also
    reach what the module starts."""
    path = [*search_path(), str(Path(__file__).parents[2])]
    start = f"import runpy, sys; sys.path += {path!r}; runpy.run_module({module!r}, None, '__main__', True)"
    return [python, "-P", "-c", start, *words]


def with_lifeline(command: Sequence[str]) -> list[str]:
    """Return the command wrapped so that it dies with the thread that starts it."""
    return module_command("mrl.processes.lifeline", str(os.getpid()), *command)


def child_environment() -> dict[str, str]:
    """Return the environment of a process that imports users' modules: this one's, one OpenMP thread."""
    return {**os.environ, **child_path(), "OMP_NUM_THREADS": "1"}


def wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for a process that is ending, kill it after `seconds`; return its status."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def terminate_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Send SIGTERM to processes, and kill those that have not ended after `seconds`."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        wait_or_kill(process, deadline - time.monotonic())


def kill_session(pid: int) -> None:
    """Kill the process group that a process leads; ignore one that is gone or another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def exit_code(status: int) -> int:
    """Return a shell's exit code for a status: 128 + N for -N (ended by signal N)."""
    return 128 - status if status < 0 else status
