"""The remover acts when its owner ends, also by SIGKILL, and on nothing else."""

import multiprocessing
import os
import signal
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from mrl.rollout.leftovers import Remover, names_of_workers

FORK = multiprocessing.get_context("fork")


def own(paths: list[Path]) -> None:
    Remover(paths)
    paths[0].with_suffix(".ready").touch()
    signal.pause()


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def test_a_killed_owners_names_are_removed_and_no_others(tmp_path: Path) -> None:
    doomed, kept = tmp_path / "with space", tmp_path / "kept"
    doomed.touch()
    kept.touch()
    process = FORK.Process(target=own, args=([doomed, tmp_path / "absent"],), daemon=True)
    process.start()
    wait_for((tmp_path / "with space.ready").exists)
    time.sleep(0.3)
    assert doomed.exists(), "nothing is removed while the owner lives"
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    wait_for(lambda: not doomed.exists())
    assert kept.exists()


def test_an_orderly_end_returns_when_the_names_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.touch()
    Remover([path]).close()
    assert not path.exists()


def test_mapped_segments_are_found() -> None:
    segment = SharedMemory(create=True, size=4096)
    try:
        assert Path("/dev/shm") / segment.name.lstrip("/") in names_of_workers()
    finally:
        segment.close()
        segment.unlink()
