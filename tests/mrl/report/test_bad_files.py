"""Run folders with bad files: every command shows what it can read and reports the rest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.observe.ledger_log import InFlightPrompts, LedgerLog
from mrl.report.audit import audit
from mrl.report.text import run_text
from tests.support.bad_files import outcome
from tests.support.run_folders import metrics_row, sample_row, write_run


def good_run(folder: Path) -> Path:
    return write_run(folder, metrics=map(metrics_row, range(1, 13)), samples=[sample_row(1, 1)])


@pytest.mark.parametrize(
    "words", [["report", "--text"], ["diagnose"], ["samples"], ["audit"]], ids=lambda words: words[0]
)
def test_a_pipe_in_a_files_place_is_not_waited_for(words: list[str], tmp_path: Path) -> None:
    run = good_run(tmp_path / "run")
    for name in ("metrics", "samples", "ledger"):
        (run / f"{name}.jsonl").unlink(missing_ok=True)
        os.mkfifo(run / f"{name}.jsonl")
    assert outcome(lambda: main([words[0], str(run), *words[1:]]))[0] in (0, 2)


def test_groups_that_are_no_number_are_named_by_the_audit(tmp_path: Path) -> None:
    run = good_run(tmp_path / "run")
    LedgerLog(run / "ledger.jsonl").start(1, InFlightPrompts([], 0))
    (run / "metrics.jsonl").write_text(json.dumps(metrics_row(3, **{"rollout/groups": "two"})) + "\n")
    assert "metrics.jsonl has no number of groups in step 3." in audit(run).other


def test_lines_that_are_all_none_are_counted(tmp_path: Path) -> None:
    run = good_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("{\n" * 5)
    assert "5 of 5 lines are not rows" in run_text(run)
