"""`mrl audit` over runs of a table that die and resume: it sees a prompt trained twice and a lost one."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from mrl.errors import WorkerLost
from mrl.observe.ledger_log import InFlightPrompts, LedgerLog
from mrl.report.audit import Audit, audit, audit_text
from mrl.samples import Group, Sample
from mrl.trajectories.group_messages import decode_group, encode_group
from tests.mrl.loops.table_policy import TableRun, config_of
from tests.support.table_environment import TableEnvironments, table_episodes

FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4}}
STREAM = ("loop.schedule=stream", "stream.max_staleness=2")
SCHEDULES = {
    "on_policy": (),
    "shared": STREAM,
    "own": (*STREAM, "launch.engine_slots=1", "rollout.tp=1", "stream.sync_every=2"),
}


def episodes() -> dict[str, Any]:
    return table_episodes(TableEnvironments(lateness=2))


def died_thrice(
    folder: Path,
    *words: str,
    algorithm: dict[str, Any] | None = None,
    tamper: Callable[[dict[str, Any]], object] = lambda state: None,
    acts: Callable[[], dict[str, Any]] | None = None,
) -> TableRun:
    """Run 14 steps; save each third; die in steps 6, 7, 11. `tamper` changes the last checkpoint resumed."""
    saves = "loop.checkpoint={every_steps: 3, keep: 99}"
    run = TableRun(config_of(folder, algorithm or {}, "loop.steps=14", saves, *words), acts=acts)
    for steps in (5, 3, 4):
        start(run)
        for _ in range(steps):
            run.loop.step()
        run.train.dies = WorkerLost("trainer rank 0 died in phase update")
        with pytest.raises(WorkerLost):
            run.loop.step()
        if steps == 4:
            tamper(run.train.saved[max(run.train.saved)][0]["supply"])
        run = run.resumed()
    start(run)
    assert run.loop.run() == "done"
    return run


def start(run: TableRun) -> None:
    run.engines.tokens_per_step, run.engines.at_once, run.engines.step_seconds = 1, 8, 0.001
    run.loop.start()


@pytest.mark.parametrize("words", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("algorithm", [{}, FILTER], ids=["all", "filter"])
def test_each_prompt_once_over_three_deaths(
    words: tuple[str, ...], algorithm: dict[str, Any], tmp_path: Path
) -> None:
    died_thrice(tmp_path, *words, algorithm=algorithm)
    report = audit(tmp_path / "run")
    assert report.passes and not report.twice and not report.skipped
    assert report.attempts == 4 and len(report.undone) >= 3, "no step was undone"
    trained = [index for line in report.lines for index in line["trained"]]
    assert len(trained) > 30 and bool(algorithm) == any(line["filtered"] for line in report.lines)
    assert "14 steps in 4 starts" in audit_text(report) and "twice 0, skipped 0" in audit_text(report)
    assert "14 rows of metrics.jsonl agree" in audit_text(report)


def test_each_episode_once_over_three_deaths(tmp_path: Path) -> None:
    died_thrice(tmp_path, *STREAM, algorithm={"estimator": {"name": "grpo"}}, acts=episodes)
    report = audit(tmp_path / "run")
    assert report.passes and sum(len(line["trained"]) for line in report.lines) == 14 * 4


def test_a_run_that_stops_tells_what_was_dropped_after_its_last_line(tmp_path: Path) -> None:
    """Between a step's line and the checkpoint of a stop, engines continue and groups are filtered."""

    def stop() -> str:
        time.sleep(0.3)
        return "SIGINT"

    config = config_of(tmp_path, FILTER, *STREAM, "launch.engine_slots=1", "rollout.tp=1", "loop.steps=9")
    run = TableRun(config, should_stop=stop)
    start(run)
    assert run.loop.run() == "SIGINT"
    dropped = [index for index, _ in run.train.saved[max(run.train.saved)][0]["supply"]["dropped"]]
    assert dropped, "nothing was dropped then"
    again = run.resumed()
    start(again)
    assert again.loop.run() == "done"
    report = audit(tmp_path / "run")
    assert report.passes and report.lines[2].starts and report.lines[2]["filtered"] == sorted(dropped)


def test_what_came_from_weights_that_are_gone_is_dropped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint's group with tokens newer than its weights is generated again."""

    def aged(sample: Sample) -> Sample:
        segments = tuple(dataclasses.replace(s, version=s.version + 50) for s in sample.segments)
        return dataclasses.replace(sample, policy_versions=sample.policy_versions + 50, segments=segments)

    def later(supply: dict[str, Any]) -> None:
        name = "kept" if supply["kept"] else "making"
        group = decode_group(supply[name][0], prompts.prompt_at)
        supply[name][0] = encode_group(Group(group.prompt, tuple(map(aged, group.samples))))
        changed.append(group.prompt.index)

    changed: list[int] = []
    prompts = TableRun(config_of(tmp_path, {}, "run.name=other", *STREAM)).prompts
    run = died_thrice(tmp_path, *STREAM, tamper=later)
    assert [row["step"] for row in run.rows() if "resume/undone_steps" in row] == [4, 7, 10]
    row = run.rows()[9]
    assert (row["resume/undone_steps"], row["resume/dropped_groups"]) == (1, 1)
    assert row["resume/undone_prompts"] == 4 and row["resume/dropped_samples"] > 0
    samples = [s for step in run.groups for group in step for s in group.samples]
    assert any(s.prompt_index == changed[0] for s in samples)
    assert all((s.policy_versions < 20).all() for s in samples)
    report = audit(tmp_path / "run")
    assert report.passes and "0 are from undone steps" in audit_text(report)
    assert "1 groups of the checkpoint" in capsys.readouterr().out


def lose(supply: dict[str, Any]) -> None:
    supply["making"].pop()
    entries = supply["ledger"]["entries"]
    entries.remove([entry for entry in entries if entry["state"] == "making"][-1])


def test_a_prompt_that_is_lost_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    died_thrice(tmp_path, *STREAM, tamper=lose)
    report = audit(tmp_path / "run")
    (index,) = report.skipped
    assert not report.twice and not any(index in line.ended() for line in report.lines)
    assert main(["audit", str(tmp_path / "run")]) == 1
    assert (
        f"prompt {index} skipped, seen in the start at step 10 of attempt 4: it never ended"
        in capsys.readouterr().out
    )


def test_a_prompt_that_is_trained_again_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def again(supply: dict[str, Any]) -> None:
        entry = next(e for e in supply["ledger"]["entries"] if e["state"] == "making")
        supply["ledger"]["entries"].insert(0, entry | {"index": 5})
        supply["making"].insert(0, encode_group(Group(run.prompt_at(5), ())))

    run = TableRun(config_of(tmp_path, {}, "run.name=other", *STREAM)).prompts
    died_thrice(tmp_path, *STREAM, tamper=again)
    assert main(["audit", str(tmp_path / "run")]) == 1
    output = capsys.readouterr().out
    assert "twice 1, skipped 0" in output
    assert "prompt 5 twice, seen in the start at step 10 of attempt 4" in output
    assert "trained in step 2 of attempt 1; trained in step 10 of attempt 4" in output


def held_out(folder: Path, *lines: dict[str, Any]) -> Audit:
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return audit(folder)


FIRST = {"start": 1, "step": 1, "next": 0}
ONE = {"step": 1, "trained": "0-1", "filtered": "2", "next": 5, "on_the_way": "3-4"}
TWO = {"step": 2, "trained": "3", "given_up": "4", "next": 5}


@pytest.mark.parametrize(
    ("two", "twice", "skipped"),
    [
        (TWO, [], []),
        (TWO | {"trained": "2-3"}, [2], []),
        (TWO | {"trained": "3,3"}, [3], []),
        (TWO | {"filtered": "3"}, [3], []),
        (TWO | {"on_the_way": "0"}, [0], []),
        (TWO | {"on_the_way": "3"}, [3], []),
        (TWO | {"trained": "3,9"}, [9], []),
        (TWO | {"trained": ""}, [], [3]),
        (TWO | {"next": 7, "on_the_way": "6"}, [], [5]),
    ],
)
def test_from_line_to_line(two: dict[str, Any], twice: list[int], skipped: list[int], tmp_path: Path) -> None:
    report = held_out(tmp_path, FIRST, ONE, two)
    assert (sorted(report.twice), sorted(report.skipped)) == (twice, skipped)


def test_other_files_must_agree(tmp_path: Path) -> None:
    """Rows of an undone attempt are no fault; a step that the ledger lacks is one."""
    rows = [{"step": 1, "rollout/groups": 2.0}, {"step": 2, "rollout/groups": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [{"step": 2, "kind": "train", "sample_id": f"{index}.1"} for index in (3, 4)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    undone = {"step": 2, "trained": "4", "on_the_way": "3", "next": 5}
    again = {"start": 2, "step": 2, "next": 5, "on_the_way": "3-4"}
    report = held_out(tmp_path, FIRST, ONE, undone, again, TWO)
    assert report.passes and "1 samples of samples.jsonl agree, 1 are from undone steps" in audit_text(report)
    assert held_out(tmp_path, FIRST, ONE, TWO).other == [
        "samples.jsonl has prompt 4 in step 2, which did not train on it."
    ]
    report = held_out(tmp_path, FIRST, ONE)
    assert report.other == ["metrics.jsonl has step 2, but ledger.jsonl ends before it: it was cut."]
    report = held_out(tmp_path, FIRST, ONE | {"trained": "0", "given_up": "1"}, TWO)
    assert "step 1 trained 2 groups by metrics.jsonl, but 1 by ledger.jsonl." in report.other


def test_a_line_that_is_none_of_a_ledger_is_named_and_passed_over(tmp_path: Path) -> None:
    """Lines of another file, endless ranges and a huge index: each is one bad line and takes no memory."""
    foreign = [
        {"step": 1},
        {"step": 1, "trained": "0-9999999999", "next": 2},
        {"step": 1, "trained": ",".join(["0-999999"] * 9), "next": 2},
        {"step": 1, "trained": "0", "next": 9_999_999_999},
        {"step": "1", "next": []},
    ]
    for line in foreign:
        report = held_out(tmp_path, FIRST, line, ONE, TWO)
        assert report.passes, audit_text(report)
        assert "ledger.jsonl: 1 of 4 lines are not rows" in audit_text(
            report
        ) and "first line 2" in audit_text(report)
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (FIRST, foreign[1])))
    assert LedgerLog(tmp_path / "ledger.jsonl").start(1, InFlightPrompts((), 0)) == [0]


def test_a_cut_file_a_run_of_before_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "ledger.jsonl does not exist. It is written from a run's first step" in capsys.readouterr().err
    (tmp_path / "ledger.jsonl").write_text('{"trained": "0-1"}\n')
    assert main(["audit", str(tmp_path)]) == 2
    assert "ledger.jsonl: 1 of 1 lines are not rows" in capsys.readouterr().err
    report = held_out(tmp_path, {"start": 1, "step": 8, "next": 30, "on_the_way": "28-29"})
    assert report.passes and "had 7 steps before ledger.jsonl: the 28 prompts" in audit_text(report)
    held_out(tmp_path, FIRST, ONE, TWO)
    whole = (tmp_path / "ledger.jsonl").read_text()
    (tmp_path / "ledger.jsonl").write_text(whole[:-9])
    report = audit(tmp_path)
    assert report.passes and "1 of 3 lines are not rows (cut or damaged)" in audit_text(report)


@pytest.mark.parametrize("inner", [".", "tune"])
def test_of_a_tuning_there_is_nothing_to_audit(
    inner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune/metrics.jsonl").write_text('{"step": 1, "tune/loss": 1.0}\n')
    assert main(["audit", str(tmp_path / inner)]) == 2
    assert (
        "was written by `mrl tune`, which trains on rows and has no ledger to audit"
        in capsys.readouterr().err
    )
