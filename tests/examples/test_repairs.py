"""The repairs of examples/programs: hidden tests fail, and pass after the reference's fix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

REPAIRS = ROOT / "examples/programs/repairs"
NAMES = sorted(path.name for path in REPAIRS.iterdir() if path.is_dir())


def passes(folder: Path, *words: str) -> bool:
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, timeout=60
    )
    assert b"Ran " in done.stderr, done.stderr  # an error of an import is not a failed test
    return done.returncode == 0


def test_there_are_ten_with_a_task_each() -> None:
    rows = [json.loads(line) for line in (REPAIRS / "tasks.jsonl").read_text().splitlines()]
    assert [row["repository"] for row in rows] == NAMES and len(NAMES) == 10
    assert all(f"tests/test_{row['repository']}.py" in row["prompt"][0]["content"] for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_tests_pass_after_the_fix_alone(name: str, tmp_path: Path) -> None:
    source, work = REPAIRS / name, tmp_path / "work"
    shutil.copytree(source / "repository", work)
    hidden, shown = str(source / "hidden/hidden_test.py"), ("-m", "unittest", f"tests/test_{name}.py")
    shutil.copy(hidden, work)
    assert passes(work, *shown) and not passes(work, "hidden_test.py")
    subprocess.run(["patch", "-s", "-p1", "-i", source / "fix.patch"], cwd=work, check=True)
    assert passes(work, *shown) and passes(work, "hidden_test.py")
