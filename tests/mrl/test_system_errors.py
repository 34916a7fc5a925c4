"""Errors of the system are one line without a traceback; an unfinished export frees its space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mrl.cli import main
from tests.golden_run import ROOT, write_golden_model, write_run

LIMITED = (
    "import resource, sys; from mrl.cli import main; "
    "import mrl.training.hf.export_folder, mrl.diagnosis.diagnosis_page\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
    "sys.exit(main(sys.argv[1:]))"
)


def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    assert main(["train", str(ROOT / "configs/quickstart.yaml"), f"run.folder={tmp_path}/file"]) == 1
    assert capsys.readouterr().err == f"mrl: {tmp_path}/file/quickstart: Not a directory\n"


def test_an_export_without_room_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path, write_golden_model(tmp_path / "model"))
    ended = limited("export", str(run), "--out", str(tmp_path / "out"))
    assert ended.returncode == 1 and ended.stderr.startswith("mrl: CheckpointError: "), ended.stderr
    assert "model.safetensors cannot be written" in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("out*"))


def limited(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, *words], capture_output=True, text=True, timeout=300, check=False
    )
