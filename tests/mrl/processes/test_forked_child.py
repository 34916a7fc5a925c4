"""Forked children: started by several threads, and at the process limit."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import filelock  # refuses forks that meet
import pytest

from mrl.processes.forked_child import ForkedChild


def serve(requests: int, replies: int) -> None:
    os.read(requests, 1)


def test_threads_fork_at_once() -> None:
    assert filelock
    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(lambda _: ForkedChild(serve).reap(), range(200)))
    assert ends == [-signal.SIGKILL] * 200


def test_a_fork_that_is_refused_leaves_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError("no process left")

    monkeypatch.setattr(os, "fork", refused)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        ForkedChild(serve)
    assert len(os.listdir("/proc/self/fd")) == len(before)
