"""Stop rules in the loop, over a table that learns: it solves its rows, and what is then done is what `loop.stop` says."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from mrl.config.sections.loop import RULES as NAMES
from mrl.diagnosis.rules import RULES
from tests.mrl.loops.table_policy import TableRun, config_of

FAST = ("training.optimizer.lr=60.0", "loop.steps=60")
STOP = "loop.stop={rules: [data_solved], patience: 4, action: %s}"


def run_of(folder: Path, *words: str, algorithm: dict[str, object] | None = None) -> TableRun:
    return TableRun(config_of(folder, algorithm or {}, *FAST, *words))


def solved_steps(rows: Sequence[dict[str, float]]) -> int:
    """The first step whose last five rows have nearly no gradient, as the rule counts it."""
    shares = [row["group/degenerate_samples_frac"] for row in rows]
    return next(n + 1 for n in range(len(rows)) if sum(shares[max(0, n - 4) : n + 1]) > 0.9 * min(5, n + 1))


def test_a_rule_stops_the_run_saves_it_and_says_why(tmp_path: Path) -> None:
    run = run_of(tmp_path, STOP % "stop")
    reason = run.finished()
    assert reason.startswith("stopped by loop.stop: data_solved since step")
    assert len(run.said) == 1 and "data_solved" in run.said[0]
    ((state, _),) = run.train.saved.values()
    last = state["next_step"] - 1
    assert last == run.rows()[-1]["step"] == solved_steps(run.rows()) + 9 + 3, (
        "10 rows of the rule, then 4 of patience"
    )
    assert "data_solved" in (tmp_path / "run/diagnosis.md").read_text()


def test_a_run_that_was_stopped_goes_on_and_has_its_patience_again(tmp_path: Path) -> None:
    run = run_of(tmp_path, STOP % "stop")
    run.finished()
    last = run.rows()[-1]["step"]
    again = run.resumed()
    assert again.finished().startswith("stopped by loop.stop")
    assert again.rows()[-1]["step"] == last + 4
    other = again.resumed(config_of(tmp_path, {}, *FAST))
    assert other.finished() == "done"
    assert [row["step"] for row in other.rows()] == list(range(1, 61))


@pytest.mark.parametrize(("action", "saves"), [("report", 0), ("save", 1)])
def test_less_than_stopping(action: str, saves: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, STOP % action)
    assert run.finished() == "done"
    assert len(run.said) == 1, "said once, though it stands to the end"
    assert len(run.train.saved) == saves
    assert (tmp_path / "run/diagnosis.md").is_file()


def test_without_rules_nothing_is_looked_at(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert run.finished() == "done"
    assert run.said == [] and not (tmp_path / "run/diagnosis.md").exists()


def test_the_settings_name_every_rule(tmp_path: Path) -> None:
    assert get_args(NAMES) == tuple(RULES)
    assert config_of(tmp_path, {}, "loop.stop.rules=all").loop.stop.rules == tuple(RULES)
