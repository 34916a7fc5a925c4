"""An engine's folder and the segments it names go when its process ends, also by SIGKILL, and nothing else goes."""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.rollout.scratch import Scratch, mapped_segments, sweep

FORK = multiprocessing.get_context("fork")


def own(root: Path, segments: Path, pipe: Any) -> None:
    scratch = Scratch(root, segments)
    make(scratch.folder, segments)
    pipe.send((scratch.folder, scratch.remover_pid))
    signal.pause()


def make(folder: Path, segments: Path) -> None:
    """As vLLM leaves it: a rendezvous file, a segment named after it, and one listed by name."""
    (folder / "vllm_dist_ab12").touch()
    (segments / "vllm_dist_ab12-tp_0-[0-1]-cpushm").touch()
    (segments / "psm with space").touch()
    (folder / "names").write_text(f"{segments / 'psm with space'}\n")


def wait_for(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """(temporary folder, folder of segments with one of a stranger in it)."""
    root, segments = tmp_path / "tmp", tmp_path / "shm"
    root.mkdir()
    segments.mkdir()
    (segments / "vllm_dist_ff-cpushm").touch()
    (root / "vllm_dist_ff").touch()
    return root, segments


def started(places: tuple[Path, Path]) -> tuple[Any, Path, int]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=own, args=(*places, theirs), daemon=True)
    process.start()
    assert ours.poll(120)
    return (process, *ours.recv())


def only_strangers(places: tuple[Path, Path]) -> bool:
    root, segments = places
    return [p.name for p in root.iterdir()] == ["vllm_dist_ff"] and [p.name for p in segments.iterdir()] == [
        "vllm_dist_ff-cpushm"
    ]


def test_a_killed_owners_names_are_removed_and_no_others(places: tuple[Path, Path]) -> None:
    process, folder, _ = started(places)
    time.sleep(0.3)
    assert folder.exists() and len(list(places[1].iterdir())) == 3, "nothing goes while the owner lives"
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    wait_for(lambda: only_strangers(places))


def test_the_next_start_sweeps_what_is_left_when_the_remover_died_too(places: tuple[Path, Path]) -> None:
    process, folder, shell = started(places)
    assert sweep(*places) == [] and folder.exists(), "its owner lives"
    os.kill(shell, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert folder.exists() and len(list(places[1].iterdir())) == 3
    scratch = Scratch(*places)
    assert not folder.exists() and scratch.folder.exists()
    scratch.close()
    assert only_strangers(places)


def test_temporary_files_are_made_inside_while_an_engine_starts(places: tuple[Path, Path]) -> None:
    usual, variable = tempfile.gettempdir(), os.environ.get("TMPDIR")
    scratch = Scratch(*places)
    with scratch.in_use():
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(scratch.folder)
    assert tempfile.gettempdir() == usual and os.environ.get("TMPDIR") == variable
    scratch.close()
    assert only_strangers(places)


def test_mapped_segments_are_found() -> None:
    segment = SharedMemory(create=True, size=4096)
    try:
        assert Path("/dev/shm") / segment.name.lstrip("/") in mapped_segments()
    finally:
        segment.close()
        segment.unlink()


def test_the_remover_is_no_child_of_its_owner(places: tuple[Path, Path]) -> None:
    """Ray kills the children of a worker that it kills."""
    scratch = Scratch(*places)
    assert psutil.Process(scratch.remover_pid).ppid() != os.getpid()
    time.sleep(2)  # longer than it waits after its owner's end
    assert scratch.folder.is_dir(), "nothing is removed while the owner lives"
    scratch.close()
    assert not scratch.folder.exists()
