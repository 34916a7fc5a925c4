"""What `mrl replay` refuses before anything is started, and the configuration that it runs with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mrl.config.root import Config
from mrl.errors import ConfigError, ReplayError
from mrl.launch.commands.replay import ReplayOptions, replay, replay_config
from mrl.loops.arrivals.schedule_file import Header, ScheduleFile, code_digest
from mrl.training.checkpoint.folder import MANIFEST
from tests.mrl.loops.table_policy import config_of


def stream_config(folder: Path) -> Config:
    return config_of(folder, {}, "loop.schedule=stream", "stream.max_age=2", "logging.trackers=[tensorboard]")


def run_with_record(folder: Path, *, first_step: int = 1, code: str = "") -> Path:
    """A run folder whose record has two steps."""
    config = stream_config(folder).model_dump(mode="json")
    (folder / "run").mkdir()
    file = ScheduleFile(folder / "run", Header(config, first_step, code or code_digest(), ["cpu"]))
    for step in (first_step, first_step + 1):
        file.add("trained", step, [], [0])
        file.add("end", step)
    file.flush()
    return folder / "run"


@pytest.mark.parametrize(
    ("first_step", "code", "options", "error", "said"),
    [
        (4, "", {}, ReplayError, r"begins with step 4.*step-000003.*is gone; replay an earlier attempt"),
        (1, "0", {}, ReplayError, r"other source code of mrl.*--any-code"),
        (1, "", {"until": 3}, ConfigError, r"--until 3: attempt-001.jsonl has steps 1 to 2"),
        (1, "", {"attempt": 2}, ReplayError, r"no record of attempt 2 \(there: attempt-001\)"),
    ],
    ids=["checkpoint", "code", "until", "attempt"],
)
def test_what_cannot_be_replayed_is_refused(first_step, code, options, error, said, tmp_path) -> None:
    run = run_with_record(tmp_path, first_step=first_step, code=code)
    with pytest.raises(error, match=said):
        replay(dataclasses.replace(ReplayOptions(run, tmp_path / "out"), **options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [({"size": 2}, "has 1 bytes, manifest.json says 2"), ({"size": 1, "gone": 1}, "gone is missing")],
)
def test_a_checkpoint_that_lacks_something_is_refused(files, said, tmp_path) -> None:
    run = run_with_record(tmp_path, first_step=4)
    folder = run / "checkpoints/step-000003"
    folder.mkdir(parents=True)
    (folder / "size").write_bytes(b"x")
    listed = {name: [count, ""] for name, count in files.items()}
    (folder / MANIFEST).write_text(json.dumps({"version": 2, "about": {}, "files": listed}))
    with pytest.raises(
        ReplayError, match=rf"begins with step 4.*damaged: .*{said}.*; replay an earlier attempt"
    ):
        replay(ReplayOptions(run, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_anything_and_a_run_without_a_record_are_refused(tmp_path: Path) -> None:
    run = run_with_record(tmp_path)
    with pytest.raises(ConfigError, match=r"--out .* is not empty"):
        replay(ReplayOptions(run, run))
    with pytest.raises(ReplayError, match=r"no record of its schedule.*stream.record"):
        replay(ReplayOptions(tmp_path, tmp_path / "out"))


def test_a_replay_has_the_runs_configuration_elsewhere(tmp_path: Path) -> None:
    config = stream_config(tmp_path)
    other = replay_config(config.model_dump(mode="json"), tmp_path / "there" / "again")
    assert (other.run.name, other.run.folder) == ("again", str(tmp_path / "there"))
    assert other.logging.trackers == () and not other.stream.record
    update = {"run": config.run, "logging": config.logging, "stream": config.stream}
    assert other.model_copy(update=update) == config
    for other in ({"loop": {"speed": 1}}, {"run": None}, {"stream": {}}):
        with pytest.raises(
            ReplayError, match=r"(?s)does not take the configuration.*the release that wrote it"
        ):
            replay_config(config.model_dump(mode="json") | other, tmp_path)
