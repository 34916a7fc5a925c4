"""vLLM's workers preload libraries from paths with spaces too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from mrl.cpu import vllm_preload
from mrl.rollout import serve


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Copy the libraries to a path with a space; nothing is preloaded yet."""
    files = dict(vllm_preload._libraries())
    assert "libgomp" in files, "torch keeps it elsewhere"
    (tmp_path / "an environment").mkdir()
    made = {name: Path(shutil.copy(file, tmp_path / "an environment")) for name, file in files.items()}
    monkeypatch.setattr(vllm_preload, "_libraries", lambda: iter(made.items()))
    monkeypatch.setenv("LD_PRELOAD", "")
    return list(made.values())


def check_preloaded(files: list[Path]) -> None:
    """Require that a new process maps the files, and that ld.so does not complain."""
    program = "print(open('/proc/self/maps').read())"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.stderr == "" and all(str(file) in done.stdout for file in files)


def test_libraries_under_a_path_with_a_space_are_preloaded(copies: list[Path]) -> None:
    vllm_preload.preload_by_short_paths()
    chosen = os.environ["LD_PRELOAD"]
    vllm_preload.preload_by_short_paths()
    assert os.environ["LD_PRELOAD"] == chosen
    check_preloaded(copies)


def test_the_processes_of_a_judges_server_preload_them_too(
    copies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub that starts one process replaces vLLM's command."""
    entry = types.ModuleType("entry")
    entry.main = lambda: check_preloaded(copies)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.launchers.api_server.entry", entry)
    monkeypatch.setattr(serve, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(copies[0].parent))
    serve.main(str(os.getppid()))
    assert sys.argv == ["vllm serve"]


def test_other_environments_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_preload, "_libraries", lambda: iter([("libgomp", Path("/opt/libgomp.so.1"))]))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    vllm_preload.preload_by_short_paths()
    assert "LD_PRELOAD" not in os.environ
