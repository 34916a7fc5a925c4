"""The watch on an engine's (real) worker processes reports deaths, but not the engine's own shutdown."""

from __future__ import annotations

import queue
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

from mrl.rollout.worker_watch import watch_workers


class Worker:
    """A process as multiprocessing has it: a name, and a descriptor that is readable after its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=-1)
        assert self.process.stdout is not None
        self.sentinel = self.process.stdout.fileno()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker("VllmWorker-0"), Worker("VllmWorker-1")]
    yield made
    for worker in made:
        worker.end()


@pytest.mark.parametrize(
    ("state", "reported"),
    [
        ({"shutting_down": False, "is_failed": False}, True),
        ({"shutting_down": True, "is_failed": True}, True),  # vLLM's own monitor was faster
        ({"shutting_down": True, "is_failed": False}, False),
        ({}, True),
    ],
)
def test_a_death_is_reported_and_a_shutdown_is_not(
    workers: list[Worker], state: dict[str, bool], reported: bool
) -> None:
    executor = types.SimpleNamespace(workers=[types.SimpleNamespace(proc=w) for w in workers], **state)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch_workers(executor, lost.put)
    workers[1].end()
    if reported:
        assert lost.get(timeout=120) == "VllmWorker-1"
    else:
        with pytest.raises(queue.Empty):
            lost.get(timeout=0.5)
