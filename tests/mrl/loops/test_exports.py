"""Exports of checkpoints during training, by real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from mrl.config.load import load
from mrl.config.sections.export import ExportSection
from mrl.errors import ConfigError
from mrl.loops.exports import Exports
from tests.golden_run import ROOT, write_run
from tests.support.processes import children
from tests.support.runs import until

LONG = 120.0


@pytest.fixture
def stuck(golden_model: Path, tmp_path: Path) -> Path:
    """Return a run whose export never ends: the model's README is a pipe without a writer."""
    copy = shutil.copytree(golden_model, tmp_path / "model")
    os.mkfifo(copy / "README.md")
    return write_run(tmp_path, copy)


def export_processes() -> list[psutil.Process]:
    return children("mrl.cli")


def only_child() -> psutil.Process:
    until(export_processes)
    (child,) = export_processes()
    return child


def test_a_checkpoint_becomes_a_folder_and_the_newest_stay(
    golden_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MRL_SESSION", "mrl-abc")  # what bears it is killed with the run's cluster
    exports = Exports(ExportSection(every_steps=2, keep=1), golden_run, run_name="run")
    for name in ("step-000001", "notes", "step-000004.partial"):
        (golden_run / "exports" / name).mkdir(parents=True)
    exports.request(1)
    assert exports.needed == set()
    exports.request(2)
    assert exports.needed == {2}
    exports.poll()
    child = only_child()
    assert exports.needed == {2} and "MRL_SESSION" not in child.environ()
    exports.wait()
    assert exports.needed == set() and not export_processes(), (golden_run / "exports.log").read_text()
    assert {p.name for p in (golden_run / "exports").iterdir()} == {"notes", "step-000002"}
    assert len(load_file(golden_run / "exports/step-000002/model.safetensors")) == 18
    exports.request(2)  # a resumed run that comes by again
    exports.poll()
    assert exports.needed == set()


def test_an_export_that_fails_is_said_and_harms_nothing(
    golden_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exports = Exports(ExportSection(every_steps=2), golden_run, run_name="run")
    exports.request(6)  # there is no such checkpoint
    exports.wait()
    assert "export of step 6 FAILED (exit code 2)" in caplog.text
    assert "step-000006 is not a checkpoint" in (golden_run / "exports.log").read_text()
    assert not list((golden_run / "exports").iterdir())


def test_an_export_past_its_deadline_is_ended(stuck: Path, caplog: pytest.LogCaptureFixture) -> None:
    exports = Exports(ExportSection(every_steps=2, deadline_seconds=0.5), stuck, run_name="run")
    exports.request(2)
    exports.wait()
    assert exports.needed == set() and not export_processes()
    assert "deadline_seconds = 0.5" in caplog.text and "export of step 2 FAILED" in caplog.text


def test_of_those_that_wait_the_newest_is_made_and_none_outlives_the_run(
    stuck: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exports = Exports(ExportSection(every_steps=2), stuck, run_name="run")
    for step in (2, 4, 6):
        exports.request(step)
        exports.poll()
    assert exports.needed == {2, 6} and "export of step 4 skipped" in caplog.text
    child = only_child()
    exports.wait(should_stop=lambda: "SIGTERM")
    assert child.is_running()
    exports.close()
    assert not child.is_running() and exports.needed == set()
    assert not list((stuck / "exports").iterdir())


DRIVER = """
import sys, time
from pathlib import Path
from mrl.config.sections.export import ExportSection
from mrl.loops.exports import Exports
exports = Exports(ExportSection(every_steps=2), Path(sys.argv[1]), run_name="run")
exports.request(2)
exports.poll()
print("started", flush=True)
time.sleep(600)
"""


def test_an_export_ends_with_a_driver_that_is_killed(stuck: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(stuck)], stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None and driver.stdout.readline() == b"started\n"
        (child,) = psutil.Process(driver.pid).children()
        driver.send_signal(signal.SIGKILL)
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        driver.kill()
        driver.wait()


def test_exports_without_checkpoints_are_refused() -> None:
    words = ["run.name=x", "loop.checkpoint.every_steps=4", "export.every_steps=6"]
    with pytest.raises(ConfigError, match=r"export\.every_steps = 6 must be a multiple of .*every_steps = 4"):
        load([ROOT / "configs/quickstart.yaml"], words)
