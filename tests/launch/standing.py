"""Fork servers that the tests of one process share: imports are most of what a run of a tiny model costs. `whole` of
tests/launch/test_train.py has its own."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import threading
from pathlib import Path
from unittest import mock

import psutil

from mrl.config.load import load_config
from mrl.launch.commands.assemble import worker_environment
from mrl.launch.workers.fork_server import STANDING, ForkServers

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Of every command."""


class Standing:
    """For eager engines of one thread; runs that want other imports have servers of their own."""

    def __init__(self) -> None:
        self._logs = tempfile.mkdtemp(prefix="mrl-fork-servers-")
        config = load_config(str(ROOT / "configs/quickstart.yaml"))
        with contextlib.chdir(ROOT), mock.patch.dict(os.environ):
            os.environ.pop("MRL_SESSION", None)  # of a test's cluster, with which all that has it ends
            environment = worker_environment(config) | ENVIRONMENT
            self.servers = ForkServers(config, environment=environment, log_folder=Path(self._logs))
            self.environment = {STANDING: self.servers.standing()}
            """Of a command that is to find them."""
        self._main = psutil.Process(self.servers.pid)

    def forked(self) -> list[psutil.Process]:
        """What lives of all that they forked, and below."""
        found = []
        for child in self._main.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.ppid() != self._main.pid:  # a server
                    found.append(child)
        return found

    def close(self) -> None:
        self.servers.close()
        shutil.rmtree(self._logs, ignore_errors=True)


@functools.cache
def standing() -> Standing:
    """Made when first asked for, by the thread that all tests run in: they end with the thread that started them."""
    assert STANDING not in os.environ and threading.current_thread() is threading.main_thread()
    return Standing()


def close() -> None:
    """Ends them, where they were made."""
    if standing.cache_info().currsize:
        standing().close()
        standing.cache_clear()
