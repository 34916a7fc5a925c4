"""The commands of docs/benchmarks.md that no other test starts, at their smallest sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import run_python

DRIVER = "--prompts 4 --samples 4 --tokens 40 --engines 2 --step-seconds 1 --steps 1"
DAY = "--device cpu --out {out}/day"
TRL = "--workloads tiny --steps 1 --rounds 1 --eager --out {out}"
"""Starts engines three times, which takes two minutes or more."""

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        pytest.param("driver", DRIVER, "the driver's own", id="driver"),
        pytest.param("gpu_day", DAY, "5 of 5 stages are done", id="gpu_day", marks=pytest.mark.slow),
        pytest.param("against_trl", TRL, "| step |", id="against_trl", marks=pytest.mark.slow),
    ],
)
def test_a_measurement_of_the_docs_runs(name: str, words: str, says: str, tmp_path: Path) -> None:
    arguments = [word.format(out=tmp_path) for word in words.split()]
    done = run_python("-m", f"benchmarks.{name}", *arguments, environment={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert says in done.stdout, done.stdout[-2000:]
