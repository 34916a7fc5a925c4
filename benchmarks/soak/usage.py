"""Measure what a run uses: memory, descriptors, threads, shared memory, Ray's files, the run folder."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.soak.life import Life

PAGE = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECONDS = 5.0
SHARED_MEMORY = Path("/dev/shm")
KINDS = {
    "gcs": r"^\S*/gcs_server",
    "raylet": r"^\S*/raylet ",
    "watcher": r"session_watcher",
    "agent": r"ray::\S*Agent",
    "train": r"ray::Train",
    "engine": r"ray::Rollout|VLLM",
    "reward": r"mrl\.rewards",
    "driver": r"mrl\.cli",
}
"""Kind of process -> pattern of its command; the first match counts."""


class Usage:
    """A file of samples: one row per SAMPLE_SECONDS, with the life and the step."""

    def __init__(self, path: Path, run_folder: Path, temporary: Path) -> None:
        """`temporary`: TMPDIR of the command."""
        self._path, self._run_folder, self._temporary = path, run_folder, temporary
        self._sampled_at = time.monotonic()

    def sample(self, life: Life, number: int) -> None:
        """Write a row if it is due and the life has made a step."""
        if time.monotonic() - self._sampled_at < SAMPLE_SECONDS or not life.step:
            return
        self._sampled_at = time.monotonic()
        figures = measured((process.pid for process in life.family()), self._run_folder, self._temporary)
        with self._path.open("a") as file:
            file.write(json.dumps({"life": number, "step": life.step, **figures}) + "\n")


def measured(pids: Iterable[int], run_folder: Path, temporary: Path) -> dict[str, float]:
    """Return figures by name: memory/KIND [bytes, resident and private], descriptors/KIND, threads/KIND and
    processes/KIND; files and bytes of shared_memory/ (/dev/shm), ray/ (`temporary`) and run/."""
    figures: collections.Counter[str] = collections.Counter()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            folder = Path(f"/proc/{pid}")
            resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
            kind = kind_of((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            counts = {"memory": (resident - shared) * PAGE, "descriptors": len(os.listdir(folder / "fd"))}
            counts |= {"threads": len(os.listdir(folder / "task")), "processes": 1}
            for name, value in counts.items():
                figures[f"{name}/{kind}"] += value
                figures[f"{name}/all"] += value
    for name, place in (("shared_memory", SHARED_MEMORY), ("ray", temporary), ("run", run_folder)):
        figures[f"{name}/files"], figures[f"{name}/bytes"] = _files(place)
    return dict(figures)


def kind_of(command: str) -> str:
    """Return the kind of the process with this command.

    >>> kind_of("/ray/raylet/raylet --port 1"), kind_of("ray::TrainActor.step"), kind_of("sleep 3")
    ('raylet', 'train', 'other')
    """
    return next((kind for kind, words in KINDS.items() if re.search(words, command)), "other")


def _files(folder: Path) -> tuple[int, int]:
    """Return the number of files and the bytes that they use on the disk."""
    number = taken = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                taken += os.lstat(os.path.join(path, name)).st_blocks * 512
                number += 1
    return number, taken
