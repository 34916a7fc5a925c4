"""A run folder has one owner at a time."""

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
