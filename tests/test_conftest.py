"""Which resources a test session considers its own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import _orphaned_segments


def test_shared_memory_of_another_user_is_not_left_by_this_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = f"torch_{ended.pid}_1_0"
    for name in (left, f"torch_{os.getpid()}_1_0", "psm_1"):
        (tmp_path / name).touch()
    assert _orphaned_segments(tmp_path) == {left}
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert not _orphaned_segments(tmp_path)
