"""A run folder has one owner at a time."""

import json
import os
from pathlib import Path

import pytest

from mrl.errors import ConfigError
from mrl.observe.run_folder import RunFolder


def test_a_second_owner_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        RunFolder(tmp_path / "run")
    first.close()
    RunFolder(tmp_path / "run").close()


def test_a_summary_that_cannot_be_written_is_a_warning(tmp_path, caplog) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "summary.json").mkdir()
    folder.write_summary({"ended": "done"})
    assert "summary.json: cannot write" in caplog.text
    folder.close()


def test_the_hardware_is_told_by_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_hardware(["H100", "H100", "A100"])
    folder.close()
    hardware = json.loads((folder.path / "hardware.json").read_text())
    assert hardware["trainer_devices"] == {"H100": 2, "A100": 1}
    assert hardware["driver"]["cores"] == os.cpu_count() and hardware["driver"]["memory_bytes"] > 2**20
