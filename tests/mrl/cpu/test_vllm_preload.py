"""What vLLM's workers preload is found under a path with a space too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cpu import vllm_preload


def test_libraries_under_a_path_with_a_space_are_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = dict(vllm_preload._libraries())
    assert "libgomp" in files, "torch keeps it elsewhere"
    (tmp_path / "an environment").mkdir()
    copies = {name: Path(shutil.copy(file, tmp_path / "an environment")) for name, file in files.items()}
    monkeypatch.setattr(vllm_preload, "_libraries", lambda: iter(copies.items()))
    monkeypatch.setenv("LD_PRELOAD", "")
    vllm_preload.preload_by_short_paths()
    chosen = os.environ["LD_PRELOAD"]
    vllm_preload.preload_by_short_paths()
    assert os.environ["LD_PRELOAD"] == chosen
    done = subprocess.run(
        [sys.executable, "-c", "print(open('/proc/self/maps').read())"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "" and all(str(file) in done.stdout for file in copies.values())


def test_other_environments_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_preload, "_libraries", lambda: iter([("libgomp", Path("/opt/libgomp.so.1"))]))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    vllm_preload.preload_by_short_paths()
    assert "LD_PRELOAD" not in os.environ
