"""A disk that takes nothing more: training goes on, says so, and saves again when there is room. And leaving at once."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import psutil
import pytest

from mrl.observe.metrics_log import MetricsLog, read
from tests.launch.command import Command
from tests.launch.tiny_runs import words

FULL_AT_BYTES = 3000
"""No file of the rank may grow beyond: every tensor file of a save fails to be written, on this rank alone."""


@pytest.mark.engine
def test_a_rank_that_cannot_write_does_not_stop_training(task: Path, tmp_path: Path) -> None:
    """At the end the rank is stopped, so that no step can end, and two interrupts leave all the same."""
    more = (
        "loop.steps=1000",
        "loop.checkpoint={every_steps: 1, max_failed: 1000}",
        "loop.validation.every_steps=0",
    )
    command, saved = (
        Command("train", *words(task, tmp_path, "run", *more), log=tmp_path / "log"),
        tmp_path / "run/checkpoints",
    )
    try:
        command.wait_for("step 1/1000", seconds=240)
        rank = command.worker(tmp_path / "run/logs/latest/train-1.log")
        rank.rlimit(psutil.RLIMIT_FSIZE, (FULL_AT_BYTES, resource.RLIM_INFINITY))
        command.wait_for("FAILED, training goes on: ", seconds=60)
        last_good = max(path.name for path in saved.iterdir() if not path.name.endswith(".partial"))
        step = int(last_good[5:])
        command.wait_for(f"step {step + 4}/1000", seconds=60)
        assert [path.name for path in saved.iterdir() if path.name > last_good + "."] == []
        assert (saved / last_good).is_dir()
        rank.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        command.wait_until(lambda: max(p.name for p in saved.iterdir()) > last_good + ".", seconds=60)
        rank.suspend()
        command.send(signal.SIGINT)
        command.wait_for("once more leaves now", seconds=60)
        command.send(signal.SIGINT)
        assert command.wait(seconds=60) == 128 + signal.SIGINT
        command.assert_nothing_left()
    finally:
        command.end()
    assert "SIGINT again: leaving now" in command.output
    message = next(line for line in command.output.splitlines() if "FAILED" in line)
    assert "rank 1" in message and "File too large" in message, message


def test_rows_wait_in_memory_for_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(0, {"a": 0.0})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limit[1]))
    try:
        for step in (1, 2):
            log.write(step, {"a": float(step)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0]
    assert "could not be written" in caplog.text
    log.write(3, {"a": 3.0})
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
