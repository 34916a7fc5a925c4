"""A run that is killed twice and resumed is one run in every tracker, with every step once.
Its starts (followed_run.py): steps 0 to 6, killed; 5 to 7, killed before closing; 5 to 9."""

from pathlib import Path

import pytest

from mrl.observe import metrics_log
from tests.mrl.observe import wandb_file
from tests.support.once import once
from tests.support.runs import run_python


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the session's runs, with `followed` killed twice."""
    return once(tmp_path_factory, "followed", follow)


def follow(folder: Path) -> None:
    done = run_python(
        "-m", "tests.mrl.observe.followed_run", str(folder), environment={"WANDB_SILENT": "true"}
    )
    assert done.returncode == 0, done.stderr
    for log in folder.glob("start-*"):
        assert "switched off" not in log.read_text(), log.read_text()


def rewards(folder: Path) -> dict[int, float]:
    """Read metrics.jsonl: steps 0 to 4 are from start 1, the others from start 3."""
    rows = metrics_log.read(folder / "followed" / "metrics.jsonl")
    return {int(row["step"]): row["reward/mean"] for row in rows}


def test_figures_of_single_layers_have_a_file_of_their_own(resumed: Path) -> None:
    rows = metrics_log.read(resumed / "followed" / "expert_load.jsonl")
    assert {int(row["step"]): row["moe/layers/000/load_entropy"] for row in rows} == rewards(resumed)
    metrics = metrics_log.read(resumed / "followed" / "metrics.jsonl")
    assert not any(name.startswith(metrics_log.LAYERS) for row in metrics for name in row)


def offline_files(folder: Path) -> list[Path]:
    """Return the files that `wandb sync` sends, in its order."""
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
