"""A run that is killed twice and resumed is one run in every tracker, with every step once, its configuration and project.

Starts of tests/mrl/observe/followed_run.py: steps 0 to 6, killed; 5 to 7, killed before anything is closed; 5 to 9.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.observe import metrics_log
from tests.mrl.observe import wandb_file

ROOT = Path(__file__).parents[3]
TRACKERS = {"WANDB_SILENT": "true"}


def start(folder: Path, first: int, last: int, number: int, end: str) -> str:
    """One start up to its kill; what it said on standard error."""
    words = [sys.executable, "-m", "tests.mrl.observe.followed_run", str(folder), first, last, number, end]
    with (folder / f"start-{number}").open("w+") as said:
        process = subprocess.Popen(
            [str(word) for word in words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **TRACKERS},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line == "written\n":
                    process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL, (folder / f"start-{number}").read_text()
        said.seek(0)
        return said.read()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs, of which `followed` was killed twice."""
    folder = tmp_path_factory.mktemp("runs")
    for number, (first, last, end) in enumerate([(0, 6, "closes"), (5, 7, "stays"), (5, 9, "closes")], 1):
        said = start(folder, first, last, number, end)
        assert "switched off" not in said, said
    return folder


def rewards(folder: Path) -> dict[int, float]:
    """Of metrics.jsonl: steps 0 to 4 by start 1, the others by start 3."""
    rows = metrics_log.read(folder / "followed" / "metrics.jsonl")
    return {int(row["step"]): row["reward/mean"] for row in rows}


def test_figures_of_single_layers_have_a_file_of_their_own(resumed: Path) -> None:
    rows = metrics_log.read(resumed / "followed" / "expert_load.jsonl")
    assert {int(row["step"]): row["moe/layers/000/load_entropy"] for row in rows} == rewards(resumed)
    metrics = metrics_log.read(resumed / "followed" / "metrics.jsonl")
    assert not any(name.startswith(metrics_log.LAYERS) for row in metrics for name in row)


def offline_files(folder: Path) -> list[Path]:
    """What `wandb sync` sends, in its order."""
    return sorted((folder / "followed" / "wandb").glob("offline-run-*/*.wandb"))


def logged(files: list[Path]) -> list[tuple[int, float]]:
    return [(row["_step"], row["reward/mean"]) for file in files for row in wandb_file.history(file)]


def test_wandb_offline_holds_the_steps_that_count_once(resumed: Path) -> None:
    assert logged(offline_files(resumed)) == list(rewards(resumed).items())
    assert [number for number, _ in rewards(resumed).items()] == list(range(10))


def test_tensorboard_shows_the_steps_that_count_once(resumed: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(resumed / "followed" / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert len(shown) == len(events.Scalars("reward/mean"))
    assert shown == pytest.approx(rewards(resumed))
