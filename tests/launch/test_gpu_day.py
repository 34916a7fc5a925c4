"""Stages of benchmarks.gpu_day: each has a limit, and one that fails does not stop the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import Stage


def stage(name: str, seconds: float = 60.0) -> Stage:
    return Stage(name, seconds, lambda device: {})


def test_results_come_stage_by_stage_and_failures_are_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = {
        "fails": "import sys; print('half'); sys.exit('no such kernel')",
        "hangs": "import time; time.sleep(1000)",
        "works": "print('a line of a library'); print('{\"speed\": 3}')",
    }
    monkeypatch.setattr(
        gpu_day, "module_command", lambda module, option, name, *others: [sys.executable, "-c", code[name]]
    )
    stages = [stage("fails"), stage("hangs", 0.25), stage("works")]
    assert gpu_day.run(stages, tmp_path, "cpu") == 2
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["stage"] for result in results] == ["fails", "hangs", "works"]
    assert results[0]["failed"] == "exit code 1; see fails.log"
    assert results[1]["failed"] == "not done after 1 s; see hangs.log"
    assert results[2]["speed"] == 3 and "failed" not in results[2]
    assert "no such kernel" in (tmp_path / "fails.log").read_text()
    assert capsys.readouterr().out.endswith("1 of 3 stages are done\n")


def test_the_day_fits_a_quarter_of_an_hour() -> None:
    assert sum(stage.seconds for stage in gpu_day.STAGES) <= 15 * 60
