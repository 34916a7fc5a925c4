"""Malformed run folders, made of a good one by seeds: every command over them shows what can be read and says what can not, or refuses
the folder in one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from mrl.observe.ledger_log import LedgerLog, Standing
from mrl.observe.metrics_log import MetricsLog, read
from mrl.observe.samples_log import SamplesLog
from mrl.report.audit import audit
from mrl.report.rows import parsed
from mrl.report.text import run_text
from tests.support.bad_files import LONGEST, failures, outcome
from tests.support.mutations import Mutator, copied
from tests.support.run_folders import metrics_row, sample_row, write_run

CASES = 300
STEPS = 12
FORMS = {".jsonl": "lines", ".yaml": "yaml", ".json": "json"}
TURN = {"said": "2", "observed": "higher", "reward": 0.5}
COMMANDS = ("report", "text", "diagnose", "diagnose-json", "audit", "samples", "resume")


def good_run(folder: Path) -> Path:
    """Twelve steps of two prompts each, with everything that commands read."""
    episode = {"opening": "guess", "turns": [TURN, TURN], "ended_by": "environment"}
    samples = [
        sample_row(step, 2 * step - 2 + n, index, **(episode if n else {}))
        for step in range(1, STEPS + 1)
        for n in (0, 1)
        for index in (0, 1)
    ]
    more = {
        "rollout/groups": 2,
        "val/reward": 0.5,
        "policy/entropy": 0.1,
        "optim/grad_norm": 2.0,
        "reward/std": 0.0,
    }
    metrics = [metrics_row(step, **more) for step in range(1, STEPS + 1)]
    config = (
        "run: {name: base}\nalgorithm: {loss: {name: ppo_clip}}\nloop: {steps: 12, prompts_per_step: 2}\n"
    )
    write_run(folder, metrics=metrics, samples=samples, config=config)
    log = LedgerLog(folder / "ledger.jsonl")
    log.start(1, Standing([], 0))
    for step in range(1, STEPS + 1):
        log.step(step, [2 * step - 2, 2 * step - 1], Standing([], 2 * step))
    for name in ("versions", "hardware", "summary"):
        (folder / f"{name}.json").write_text(json.dumps({"mrl": "1", "driver": {"cores": 2}, "last": {}}))
    return folder


class Cases:
    """One malformed folder, and a command over it."""

    def __init__(self, good: Path) -> None:
        self._good = good

    def __call__(self, mutator: Mutator, folder: Path) -> None:
        run = copied(self._good, folder / "run")
        names = sorted(path.name for path in run.iterdir())
        names += ["metrics.jsonl", "samples.jsonl", "ledger.jsonl"] * 3
        for _ in range(mutator.choose([1, 1, 2])):
            path = run / mutator.choose(names)
            if path.is_file() and not path.is_symlink():
                mutator.told.append(path.name)
                mutator.spoil(path, FORMS[path.suffix])
        command = mutator.choose([*COMMANDS])
        mutator.told.append(command)
        if command == "resume":
            resumed(run)
        else:
            commanded(command, run)


def commanded(command: str, run: Path) -> None:
    """The command line: 0, or 1 where an audit does not hold, with an answer; else one sentence and its code."""
    words = {
        "report": ["report", str(run)],
        "text": ["report", str(run), "--text"],
        "diagnose": ["diagnose", str(run)],
        "diagnose-json": ["diagnose", str(run), "--json"],
        "audit": ["audit", str(run)],
        "samples": ["samples", str(run), "--limit", "100"],
    }[command]
    answer, complaint = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(complaint):
        code, _ = outcome(lambda: main(words))
    answer.flush()
    said = answer.buffer.getvalue().decode()  # type: ignore[attr-defined] it is a BytesIO
    if code == 0 or (code == 1 and said):
        assert said and not complaint.getvalue(), complaint.getvalue()
        require_told(command, run, said)
    else:
        assert complaint.getvalue().startswith("mrl: ") and len(complaint.getvalue()) < LONGEST, (
            complaint.getvalue()
        )
        assert "Traceback" not in complaint.getvalue()


def require_told(command: str, run: Path, said: str) -> None:
    """Lines of rows that are none are counted."""
    name = {"text": "metrics", "diagnose": "metrics", "audit": "ledger", "samples": "samples"}.get(command)
    path = run / f"{name}.jsonl"
    if name is None or not path.is_file():
        return
    lines = path.read_bytes().splitlines()
    if bad := sum(parsed(line) is None for line in path.read_bytes().split(b"\n")[: len(lines)] if line):
        assert f"{name}.jsonl: " in said and "no rows" in said, (bad, said[:500])


def resumed(run: Path) -> None:
    """What a start of the run at step 7 does to the files: rows of steps before stay as they are."""
    path = run / "metrics.jsonl"
    before = read(path) if path.is_file() else []

    def go_on() -> None:
        MetricsLog(path).resume_at(7)
        SamplesLog(run / "samples.jsonl", limit=4).resume_at(7)
        LedgerLog(run / "ledger.jsonl").start(7, Standing([], 12))

    _, said = outcome(go_on)
    if not said and path.is_file():
        kept = [row for row in before if row["step"] < 7]
        assert json.dumps(read(path)) == json.dumps([plain(row) for row in kept])


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON has not are written as texts."""
    return {
        name: str(value)
        if isinstance(value, float) and (value != value or abs(value) == float("inf"))
        else value
        for name, value in row.items()
    }


@pytest.fixture
def cases(tmp_path: Path) -> Cases:
    return Cases(good_run(tmp_path / "good"))


@pytest.mark.parametrize(
    "words", [["report", "--text"], ["diagnose"], ["samples"], ["audit"]], ids=lambda words: words[0]
)
def test_a_pipe_in_a_files_place_is_not_waited_for(words: list[str], tmp_path: Path) -> None:
    run = good_run(tmp_path / "run")
    for name in ("metrics", "samples", "ledger"):
        (run / f"{name}.jsonl").unlink()
        os.mkfifo(run / f"{name}.jsonl")
    assert outcome(lambda: main([words[0], str(run), *words[1:]]))[0] in (0, 2)


def test_groups_that_are_no_number_are_named_by_the_audit(tmp_path: Path) -> None:
    run = good_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(json.dumps(metrics_row(3, **{"rollout/groups": "two"})) + "\n")
    assert "metrics.jsonl has no number of groups in step 3." in audit(run).other


def test_lines_that_are_all_none_are_counted(tmp_path: Path) -> None:
    run = good_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("{\n" * 5)
    assert "5 of 5 lines are no rows" in run_text(run)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_malformed_runs(every: int, cases: Cases, tmp_path: Path) -> None:
    found = failures("run", range(0, CASES, every), cases, tmp_path)
    assert not found, found
