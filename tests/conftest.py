"""What every test runs under: quiet offline engines, few threads, and nothing left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After the whole session no process of ours runs and no segment of ours lies in shared memory."""
    before = set(Path("/dev/shm").iterdir())
    yield
    left = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(left, timeout=10)
    names = [(p.pid, p.name()) for p in alive if p.is_running() and "resource_tracker" not in " ".join(_words(p))]
    segments = sorted(str(s) for s in set(Path("/dev/shm").iterdir()) - before if "mrl" in s.name or "torch" in s.name)
    assert not names, f"processes left by the tests: {names}"
    assert not segments, f"shared memory left by the tests: {segments}"


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
