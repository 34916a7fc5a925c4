"""The commands of docs/benchmarks.md that no other test starts, at their smallest sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = {
    "driver": "--prompts 4 --samples 4 --tokens 40 --engines 2 --step-seconds 1 --steps 1",
    "driver_parts": "--prompts 2 --samples 2 --tokens 20",
    "against_trl": "--workloads tiny --steps 1 --rounds 1 --eager --out {out}",
}
SAYS = {
    "driver": "the driver's own",
    "driver_parts": "rewards to advantages",
    "against_trl": "| step |",
}

pytestmark = pytest.mark.integration


LONG = ("against_trl",)
"""Three starts of engines, two minutes and more."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in TINY]
)
def test_a_measurement_of_the_docs_runs(name: str, tmp_path: Path) -> None:
    words = [word.format(out=tmp_path) for word in TINY[name].split()]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS[name] in done.stdout, done.stdout[-2000:]
