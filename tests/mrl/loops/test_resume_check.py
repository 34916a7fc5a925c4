"""A run resumes with settings that differ from its checkpoint's, or says in one sentence why it cannot."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from mrl.errors import CheckpointError, ConfigError
from mrl.loops.resume_check import kept_settings, require_resumable
from mrl.report.audit import audit, audit_text
from mrl.training.checkpoint.checkpoint_folder import EXTRA_FILE, candidates, read_extra
from mrl.trajectories.group_messages import encode_group
from tests.mrl.loops.table_policy import TableRun, config_of

SAVES = ("loop.checkpoint={every_steps: 1, keep: 99}", "loop.phase_deadline_seconds=60")
STREAM = ("loop.schedule=stream", "stream.max_staleness=3")
FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4}}


def after_three_steps(folder: Path, *words: str) -> TableRun:
    run = TableRun(config_of(folder, FILTER, "loop.steps=4", *SAVES, *words))
    run.engines.tokens_per_step, run.engines.at_once = 1, 20
    run.loop.start()
    for _ in range(3):
        run.loop.step()
    return run


def resumed(run: TableRun, folder: Path, *words: str) -> TableRun:
    again = run.resumed(config_of(folder, FILTER, "loop.steps=18", *SAVES, *words))
    assert again.finished() == "done"
    report = audit(folder / "run")
    assert report.passes, audit_text(report)
    return again


@pytest.mark.parametrize("schedule", [STREAM, ()], ids=["stream", "on policy"])
@pytest.mark.parametrize("size", [2, 8])
def test_groups_on_their_way_become_as_large_as_new_ones(
    size: int, schedule: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = after_three_steps(tmp_path, *schedule)
    again = resumed(run, tmp_path, *schedule, f"loop.samples_per_prompt={size}")
    assert {len(group.samples) for groups in again.groups for group in groups} == {size}
    message = f"resumed with changed settings: loop.samples_per_prompt = {size} (was 4)"
    assert message in capsys.readouterr().out


def test_a_smaller_batch_says_how_old_tokens_become(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = after_three_steps(tmp_path, *STREAM)
    with caplog.at_level(logging.WARNING):
        again = resumed(run, tmp_path, *STREAM, "loop.prompts_per_step=1")
    match = re.search(
        r"until step (\d+) tokens may be (\d+) versions stale, but these settings allow 3", caplog.text
    )
    assert match, caplog.text
    until, age = map(int, match.groups())
    ages = {row["step"]: row["policy/staleness_max"] for row in again.rows() if row["step"] > 3}
    assert 3 < max(ages.values()) <= age, ages
    assert all(ages[step] <= 3 for step in ages if step > until)


def test_what_was_judged_is_trained_after_a_resume(tmp_path: Path) -> None:
    run = after_three_steps(tmp_path, *STREAM)
    run.rollouts.close()
    kept = run.train.saved[max(run.train.saved)][0]["supply"]["kept"]
    assert kept, "the checkpoint has no group that waits for its step"
    again = resumed(run, tmp_path, *STREAM)
    trained = [encode_group(group) for groups in again.groups for group in groups]
    assert trained[: len(kept)] == kept


def test_the_same_settings_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        resumed(after_three_steps(tmp_path, *STREAM), tmp_path, *STREAM)
    assert "changed settings" not in capsys.readouterr().out and "versions stale" not in caplog.text


def test_samples_that_were_no_episodes_cannot_become_some(tmp_path: Path) -> None:
    """A domain keeps or lacks its environment for the whole run; which one it has may change."""
    plain = "agent={environment: tests.support.guess:Guess, domains: {prose: {}}}"
    state = {"supply": {}, "settings": kept_settings(config_of(tmp_path, FILTER, plain))}
    assert state["settings"]["agent"] == "a section not for prose"
    require_resumable(state, config_of(tmp_path, FILTER, plain, "agent.environment=calculator"))
    for agent in (
        "{environment: tests.support.guess:Guess}",
        "{environment: tests.support.guess:Guess, "
        "domains: {prose: {environment: tests.support.guess:Guess}}}",
    ):
        with pytest.raises(
            ConfigError, match=r"agent = a section, but .* was saved with a section not for prose,"
        ):
            require_resumable(state, config_of(tmp_path, FILTER, f"agent={agent}"))
    only = config_of(tmp_path, FILTER, "agent={domains: {riddles: {environment: tests.support.guess:Guess}}}")
    assert kept_settings(only)["agent"] == "a section for riddles"


def test_a_state_that_cannot_be_read_says_what_can_be_done(tmp_path: Path) -> None:
    (tmp_path / EXTRA_FILE).write_bytes(b"cmrl.loops.gone\nState\n.")
    with pytest.raises(CheckpointError, match=r"not plain values.*mrl export"):
        read_extra(tmp_path)


@pytest.mark.parametrize("keep", [1, 9])
def test_a_refused_checkpoint_is_set_aside_and_its_step_saved_again(keep: int, tmp_path: Path) -> None:
    """The newest two are damaged; neither counts as the newest when others are removed."""
    run = after_three_steps(tmp_path)
    folder = tmp_path / "run/checkpoints"
    for step in (2, 3):
        del run.train.saved[folder / f"step-{step:06d}"]
    again = run.resumed(config_of(tmp_path, FILTER, "loop.steps=4", *SAVES, f"loop.checkpoint.keep={keep}"))
    again.loop.start()
    again.loop.step()
    saved = ["step-000001", "step-000002"][-keep:]
    aside = ["step-000002.damaged", "step-000003.damaged"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*saved, *aside])
    again.loop.step()
    assert again.train.saved.keys() == {folder / "step-000002", folder / "step-000003"}
    assert [path.name for path in candidates(folder)] == ["step-000003", *reversed(saved)][:keep]
