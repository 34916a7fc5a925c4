"""On a full disk training continues, reports it, and saves again when there is space."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
from pathlib import Path

import pytest

from mrl.observe.metrics_log import MetricsLog, read
from tests.launch.command import Command
from tests.launch.tiny_runs import words

SMALL_DISK = (
    "unshare",
    *("--user", "--map-root-user", "--mount"),
    *("sh", "-c", 'mount -t tmpfs -o size=40m small "$0" && exec "$@"'),
)
"""Runs a command in its own mount namespace, in which the first folder is a disk of 40 MiB."""


@pytest.mark.integration
def test_a_disk_without_space_does_not_stop_training(task: Path, tmp_path: Path) -> None:
    """All outputs are on the disk; a full disk costs only what had to be written to it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = (
        "loop.steps=1000", "loop.checkpoint={every_steps: 1, max_failed: 1000}",
        "loop.validation.every_steps=0", "logging.trackers=[tensorboard]",
    )  # fmt: skip
    with Command(
        "train", *words(task, disk, "run", *settings), log=tmp_path / "log", under=(*SMALL_DISK, str(disk))
    ) as command:
        command.wait_for("step 1/1000", seconds=400)
        inside = Path(f"/proc/{command.process.pid}/root") / disk.relative_to("/")
        saved = inside / "run/checkpoints"
        fill(inside / "filler")
        command.wait_for("FAILED, training goes on: ", seconds=400)
        assert "No space left on device" in command.output
        before = last_step(command.output)
        command.wait_until(lambda: last_step(command.output) >= before + 5, seconds=400)
        (inside / "filler").unlink()
        command.wait_until(lambda: max_step(saved) > before + 5, seconds=400)
        command.send(signal.SIGINT)
        command.wait_until(lambda: (inside / "run/summary.json").is_file(), seconds=400)
        rows = [int(row["step"]) for row in read(inside / "run/metrics.jsonl")]
        assert rows == list(range(rows[-1] + 1)) and rows[-1] > before + 5
        assert max_step(saved) == rows[-1]
        assert command.wait(seconds=400) == 128 + signal.SIGINT
        command.assert_nothing_left()


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def last_step(output: str) -> int:
    return max(int(n) for n in re.findall(r"^step (\d+)/", output, re.MULTILINE))


def max_step(saved: Path) -> int:
    """Return the newest step among the committed checkpoints."""
    return max((int(p.name[5:]) for p in saved.iterdir() if p.name[5:].isdigit()), default=0)


def test_rows_wait_in_memory_for_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(0, {"group/kept": 0.0})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limit[1]))
    try:
        for step in (1, 2):
            log.write(step, {"group/kept": float(step)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0]
    assert "cannot write" in caplog.text
    log.write(3, {"group/kept": 3.0})
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
