"""An engine's folder and its segments go when its process ends, even by SIGKILL; nothing else goes."""

import multiprocessing
import os
import signal
import tempfile
import time
import uuid
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.rollout.scratch import Scratch, mapped_segments, remove_stale_scratch
from tests.support.another_user import NOBODY, by_root

FORK = multiprocessing.get_context("fork")


def own(root: Path, segments: Path, pipe: Any) -> None:
    scratch = Scratch(root, segments)
    make(scratch.folder, segments)
    pipe.send((scratch.folder, scratch.remover_pid))
    signal.pause()


def make(folder: Path, segments: Path) -> None:
    """Leave what vLLM leaves: a rendezvous file, a segment named after it, and a listed one."""
    (folder / "vllm_dist_ab12").touch()
    (segments / "vllm_dist_ab12-tp_0-[0-1]-cpushm").touch()
    (segments / "psm_a b").touch()
    (folder / "names").write_text(f"{segments / 'psm_a b'}\n")


def wait_for(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Return (temporary folder, folder of segments with a stranger's segment)."""
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
    assert remove_stale_scratch(*places) == [] and folder.exists(), "its owner lives"
    os.kill(shell, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert folder.exists() and len(list(places[1].iterdir())) == 3
    scratch = Scratch(*places)
    assert not folder.exists() and scratch.folder.exists()
    scratch.close()
    assert only_strangers(places)


def test_only_segments_that_vllm_names_are_removed(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Other names in the engine folder's list are ignored."""
    root, segments = places
    folder = root / "mrl-engine-999999999-1-ab"  # no process has such a number
    folder.mkdir()
    others = [tmp_path / "psm_file", segments / "psm_folder/file", segments / "sem.other"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (segments / "psm_1").touch()
    lines = [*others, f"{segments}/../psm_file", f"{segments}/psm_folder/../../psm_file", "", "psm_1"]
    (folder / "names").write_text("".join(f"{line}\n" for line in lines))
    assert remove_stale_scratch(root, segments) == [folder] and not folder.exists()
    assert all(path.exists() for path in others) and not (segments / "psm_1").exists()


def test_a_link_is_not_swept(places: tuple[Path, Path], tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "names").write_text(f"{places[1]}/vllm_dist_ff-cpushm\n")
    link = places[0] / "mrl-engine-999999999-1-ab"
    link.symlink_to(linked)
    assert remove_stale_scratch(*places) == [] and link.is_symlink() and (linked / "names").exists()
    link.unlink()
    assert only_strangers(places)


@by_root
def test_what_another_user_made_is_not_swept(places: tuple[Path, Path]) -> None:
    folder = places[0] / "mrl-engine-999999999-1-ab"
    folder.mkdir()
    (folder / "names").write_text(f"{places[1]}/vllm_dist_ff-cpushm\n")
    (folder / "vllm_dist_ff").touch()
    os.chown(folder, NOBODY, NOBODY)
    assert remove_stale_scratch(*places) == [] and (folder / "names").exists()
    assert (places[1] / "vllm_dist_ff-cpushm").exists()


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


def test_the_paths_of_sockets_fit_whatever_the_folder_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    scratch = Scratch()
    try:
        assert len(f"{scratch.folder}/{uuid.uuid4()}") <= 107 and scratch.folder.is_dir()
    finally:
        scratch.close()
