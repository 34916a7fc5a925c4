"""A stream over the table policy whose engines, reward workers and trainer are as fast as dice say: recorded, and done again."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.agents.episode import EndedBy
from mrl.errors import ReplayError, WorkerLost
from mrl.loops.arrivals.as_they_come import Arrivals, Digests
from mrl.loops.arrivals.engine_time import EngineTime
from mrl.loops.arrivals.recording import Recording
from mrl.loops.arrivals.replaying import NoEnvironments, Replaying
from mrl.loops.arrivals.schedule_file import (
    FORMAT,
    Header,
    ScheduleFile,
    ScheduleRecord,
    code_digest,
    describe_difference,
    read_record,
    told_response,
    told_verdict,
    verdict_told,
)
from mrl.pool.group_bytes import encode_group
from mrl.rollout.request import GenerationRequest
from mrl.samples import Group
from tests.mrl.loops.table_policy import TableRun, config_of
from tests.support.samples import make_response, verdict_of
from tests.support.table_environment import TableEnvironments, table_episodes

FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4}}
STEPS = 8
SPLITS = {"shared": (), "own": ("launch.engine_slots=1", "rollout.tp=1")}


def table_run(
    folder: Path, name: str, seed: int, arrivals: Callable[[], Any], *words: str, **more: Any
) -> TableRun:
    config = config_of(
        folder,
        FILTER,
        "loop.schedule=stream",
        "stream.max_age=2",
        f"run.name={name}",
        f"loop.steps={STEPS}",
        *words,
    )
    run = TableRun(config, arrivals=arrivals, dice=random.Random(seed), **more)
    run.engines.tokens_per_poll, run.engines.at_once, run.engines.is_called = 1, 10, True
    return run


def recorded(folder: Path, *words: str) -> TableRun:
    (folder / "run").mkdir()
    file = ScheduleFile(folder / "run", Header({}, 1, code_digest(), ["cpu"]))
    run = table_run(folder, "run", 1, lambda: Recording(Arrivals(), file), *words)
    assert run.finished() == "done"
    return run


def replayed(folder: Path, record: ScheduleRecord, *words: str, **more: Any) -> tuple[TableRun, Replaying]:
    """With other dice."""
    replay = Replaying(record, judge_again=False, deadline_seconds=5)
    run = table_run(folder, f"again-{len(list(folder.iterdir()))}", 2, lambda: replay, *words, **more)
    run.loop.start()
    next(number for number in run.loop.steps() if number == record.last_step)
    return run, replay


@pytest.mark.parametrize(("lateness", "clock"), [(1, "wall"), (4, "wall"), (4, "logical")])
def test_a_replay_of_episodes_asks_no_environment(lateness: int, clock: str, tmp_path: Path) -> None:
    """Their answers are in the record: one that comes later, or says something else, changes nothing."""
    (tmp_path / "run").mkdir()
    file = ScheduleFile(tmp_path / "run", Header({"stream": {"clock": clock}}, 1, code_digest(), ["cpu"]))
    arrivals = Arrivals() if clock == "wall" else EngineTime(deadline_seconds=5)
    faults = {"0.1/0": EndedBy.ENV_CRASHED}
    first = table_run(
        tmp_path,
        "run",
        1,
        lambda: Recording(arrivals, file),
        episodes=lambda: table_episodes(
            TableEnvironments(lateness=lateness, opens_with="321", faults=faults)
        ),
    )
    assert first.finished() == "done"
    record = read_record(tmp_path / "run")
    again, _ = replayed(tmp_path, record, episodes=lambda: table_episodes(NoEnvironments()))
    assert samples(again) == samples(first)
    assert torch.equal(again.train.table, first.train.table)
    ends = {s.transcript.faults for groups in again.groups for g in groups for s in g.samples if s.transcript}
    assert ends == {0, 1}, "the fault was not replayed"
    told = (answer for event in record.events if event[0] == "answers" for answer in event[1])
    next(answer for answer in told if answer[1] > 0 and answer[4] is None)[4] = "env_done"
    with pytest.raises(ReplayError, match="parts from the record"):
        replayed(tmp_path, record, episodes=lambda: table_episodes(NoEnvironments()))


def test_calls_that_last_are_repeated_to_the_beat(tmp_path: Path) -> None:
    """How many beats a call makes depends on a clock (here on dice); what it brings, and what a park cuts, on nothing else."""
    first = recorded(tmp_path)
    record = read_record(tmp_path / "run")
    calls = [n for event in record.events if event[0] in ("took", "park") for _, n in event[-1]]
    assert {1, 2, 3} <= set(calls) and sum(event[0] == "park" for event in record.events) > 1
    again, replay = replayed(tmp_path, record)
    assert replay.beats == {0: calls}
    assert samples(again) == samples(first) and torch.equal(again.train.table, first.train.table)
    took = next(event for event in record.events if event[0] == "took" and event[2] and event[-1][0][1] == 3)
    took[-1] = [[0, 1]]
    with pytest.raises(ReplayError, match="parts from the record"):
        replayed(tmp_path, record)


def samples(run: TableRun) -> list[list[bytes]]:
    """Of each step, without what a record has not: who judged and why."""
    return [[encode_group(_bare(group)) for group in groups] for groups in run.groups]


def _bare(group: Group) -> Group:
    bare = [
        s.with_verdict(dataclasses.replace(s.verdict, reason="", verifier="", seconds=0.0))
        for s in group.samples
        if s.verdict
    ]
    return Group(group.prompt, tuple(bare))


@pytest.mark.parametrize("split", SPLITS)
def test_a_replay_is_the_run_to_the_bit_whatever_the_speed(split: str, tmp_path: Path) -> None:
    """Of all samples with their segments, and of the weights, with calls that a validation leaves; a run that is not told the order is
    another one."""
    words = (*SPLITS[split], "loop.validation.every_steps=2")
    first = recorded(tmp_path, *words)
    record = read_record(tmp_path / "run")
    again, replay = replayed(tmp_path, record, *words)
    assert samples(again) == samples(first)
    assert torch.equal(again.train.table, first.train.table)
    assert replay.compared["responses"] > 100 and replay.compared["weights"] == STEPS + 1
    other = table_run(tmp_path, "other", 2, Arrivals, *words)
    assert other.finished() == "done"
    assert samples(other) != samples(first)


def test_a_replay_validates_where_the_run_owed_it(tmp_path: Path) -> None:
    """A run that died between a checkpoint and the validation behind it makes that before it goes on; its replay cannot know that from
    its own folder."""
    words = ("loop.validation.every_steps=2", "loop.checkpoint={every_steps: 1, keep: 9}")
    header = Header({}, 1, code_digest(), ["cpu"])
    (tmp_path / "run").mkdir()

    def clock() -> Recording:
        return Recording(Arrivals(), ScheduleFile(tmp_path / "run", header))

    run = table_run(tmp_path, "run", 1, clock, *words)
    run.loop.start()
    run.loop.step()
    run.engines.dies = WorkerLost("in phase sync")
    with pytest.raises(WorkerLost):
        run.loop.step()
    second = run.resumed()
    assert second.finished() == "done"
    record = read_record(tmp_path / "run")
    assert [event[0] for event in record.events[:2]] == ["start", "validates"]
    state, table = run.train.saved[max(run.train.saved)]
    replay = Replaying(record, judge_again=False, deadline_seconds=5)
    again = table_run(tmp_path, "again", 2, lambda: replay, *words)
    with torch.no_grad():
        again.train.table.copy_(table)
    again.loop.restore(state)
    again.loop.start()
    assert list(again.loop.steps()) == list(range(2, STEPS + 1))
    assert samples(again) == samples(second)
    told = [[row.get("val/reward") for row in each.rows() if row["step"] > 1] for each in (again, second)]
    assert told[0] == told[1] and told[0][0] is not None


def test_a_replay_stops_where_weights_or_tokens_are_others(tmp_path: Path) -> None:
    recorded(tmp_path)
    record = read_record(tmp_path / "run")
    with pytest.raises(
        ReplayError, match=r"step 1 parts.*all tokens so far are equal, the new weights are not"
    ):
        replayed(tmp_path, record, "training.optimizer={lr: 0.4}")
    replay = Replaying(record, judge_again=False, deadline_seconds=5)
    run = table_run(tmp_path, "damaged", 2, lambda: replay)
    run.engines.damage[0, 0] = 1e-3
    run.loop.start()
    with pytest.raises(ReplayError, match=r"step 1 .*sample \d+\.\d+, request 0: other .* from token"):
        run.loop.step()


def test_a_record_of_another_batch_size_says_where_it_parts(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(ReplayError, match=r"prompts may be admitted where the record admits|comes to"):
        replayed(tmp_path, read_record(tmp_path / "run"), "loop.prompts_per_step=3")


def test_judging_again_names_rewards_that_are_no_function_of_the_sample(tmp_path: Path) -> None:
    first = recorded(tmp_path)
    record = read_record(tmp_path / "run")
    name, kind, value, more = next(e for e in record.events if e[0] == "verdicts")[1][0]
    next(e for e in record.events if e[0] == "verdicts")[1][0] = [name, kind, 1.0 - value, more]
    replay = Replaying(record, judge_again=True, deadline_seconds=5)
    run = table_run(tmp_path, "again", 2, lambda: replay)
    run.loop.start()
    with pytest.raises(ReplayError):  # the changed reward, which is taken, leads elsewhere
        run.loop.run()
    assert replay.other_verdicts == [f"{name}: {1.0 - value} scored, asked again {value} scored"]
    assert first.loop.version == STEPS


def test_a_record_that_is_cut_is_read_to_its_last_whole_step(tmp_path: Path) -> None:
    recorded(tmp_path)
    path = read_record(tmp_path / "run").path
    lines = path.read_text().splitlines(keepends=True)
    ends = [n for n, line in enumerate(lines) if line.startswith('["end"')]
    path.write_text("".join(lines[: ends[4] + 3]) + lines[ends[4] + 3][:5])
    record = read_record(tmp_path / "run")
    assert record.last_step == 5
    run, _ = replayed(tmp_path, record)
    assert run.loop.version == 5
    path.write_text("".join([*lines[: ends[4]], '["lost"]\n', *lines[ends[4] :]]))
    assert read_record(tmp_path / "run").last_step == 4, "an engine was lost in step 5"
    path.write_text("".join([*lines[: ends[0]], '["lost"]\n', *lines[ends[0] :]]))
    with pytest.raises(ReplayError, match=r"has no whole step: an engine was lost"):
        read_record(tmp_path / "run")
    for garbage in ("[[garbage", '["took", [0]]\n', '["speed"]\n', '["end"]\n'):
        path.write_text("".join(lines[:4]) + garbage)
        with pytest.raises(ReplayError, match=r"has no whole step: line 5 cannot be read.*--attempt"):
            read_record(tmp_path / "run")
    for cut in (0, 20):
        path.write_text(lines[0][:cut])
        with pytest.raises(ReplayError, match=r"is empty or cut in its first line.*--attempt"):
            read_record(tmp_path / "run")
    path.write_text(lines[0].replace(f'"format": {FORMAT}', '"format": 99'))
    with pytest.raises(ReplayError, match=r"no record of this release \(format 99"):
        read_record(tmp_path / "run")
    with pytest.raises(ReplayError, match=r"no record of attempt 7 \(there: attempt-001\)"):
        read_record(tmp_path / "run", 7)


@pytest.mark.parametrize("count", [1, 3, 64, 65, 1000])
def test_the_first_token_that_differs_is_found(count: int) -> None:
    """To the token up to 64, else to its part; a log-prob that moved by one bit is told from another token."""
    rng = np.random.default_rng(count)
    request = GenerationRequest("3.1", np.array([5], np.int32), 0, count)
    tokens, logprobs = rng.integers(0, 1000, count), -rng.random(count).astype(np.float32)
    told = told_response(make_response(request, tokens.tolist(), logprobs=logprobs.tolist()))
    place = count // 2
    moved = logprobs.copy()
    moved[place] = np.nextafter(moved[place], np.float32(0))
    said = describe_difference(
        told, told_response(make_response(request, tokens.tolist(), logprobs=moved.tolist()))
    )
    assert said.startswith("sample 3.1, request 0: other log-probs of the same tokens from token")
    size = -(-count // 64)
    first = place // size * size
    assert f"token {first} of" in said or f"tokens {first} to " in said
    other = tokens.copy()
    other[place] += 1
    assert "other tokens" in describe_difference(
        told, told_response(make_response(request, other.tolist(), logprobs=logprobs.tolist()))
    )
    assert describe_difference(told, json.loads(json.dumps(told))) == ""


def test_a_verdict_comes_back_as_it_was() -> None:
    verdict = verdict_of(
        0.1 + 0.2, parts={"format": 1.0}, token_values=np.array([np.nan, 0.5], np.float32), is_return=True
    )
    name, again = verdict_told(json.loads(json.dumps(told_verdict("1.2", verdict))))
    assert name == "1.2" and again.value == verdict.value and again.parts == verdict.parts and again.is_return
    np.testing.assert_array_equal(again.token_values, verdict.token_values)


def test_digests_are_asked_only_where_someone_reads_them() -> None:
    def never() -> list[int]:
        raise AssertionError("asked")

    ask: Digests = never
    Arrivals().starts(0, ask)
    Arrivals().trained(1, [0], ask)
