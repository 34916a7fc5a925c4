"""A stream that counts engine steps instead of seconds, over the table policy with dice for speeds."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.root import Config
from mrl.errors import ConfigError, RewardError, WorkerLost
from mrl.loops.arrivals import engine_time
from mrl.loops.arrivals.as_they_come import Arrivals
from mrl.loops.arrivals.engine_time import EngineTime
from mrl.loops.arrivals.recording import Recording
from mrl.loops.arrivals.schedule_file import Header, ScheduleFile
from mrl.loops.episodes import Episodes
from mrl.pool.group_bytes import decode_group, encode_group
from mrl.samples import Status
from tests.mrl.loops.scripted import ScriptedRewards, mixed
from tests.mrl.loops.table_policy import ROWS, TableRun, config_of
from tests.support.table_environment import TableEnvironments, table_episodes

FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4}}
SPLITS = {"shared": (), "own": ("launch.engine_slots=1", "rollout.tp=1")}
STEPS = 12


@pytest.fixture(autouse=True)
def other_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts come looks later, and an update takes fewer ticks than one call of an engine and another."""
    monkeypatch.setattr(engine_time, "UPDATE_TICKS", 3)
    monkeypatch.setattr(engine_time, "VERDICT_TICKS", 3)


def config(folder: Path, name: str, *words: str) -> Config:
    return config_of(
        folder,
        FILTER,
        "loop.schedule=stream",
        "stream.max_age=2",
        "stream.clock=logical",
        "loop.checkpoint={every_steps: 1, keep: 20}",
        f"loop.steps={STEPS}",
        f"run.name={name}",
        *words,
    )


def table_run(settings: Config, seed: int, *, wall: bool = False, acts: bool = False) -> TableRun:
    """Speeds by the dice of `seed`. It is recorded, as a run of the command is."""
    folder = Path(settings.run_folder)
    folder.mkdir(parents=True, exist_ok=True)

    def clock() -> Any:
        inner = Arrivals() if wall else EngineTime(deadline_seconds=5)
        return Recording(inner, ScheduleFile(folder, Header({}, 1, "", [])))

    episodes = (lambda: episodes_of(seed)) if acts else None
    run = TableRun(settings, arrivals=clock, dice=random.Random(seed), episodes=episodes)
    run.engines.tokens_per_poll, run.engines.at_once, run.engines.is_called = 1, 10, True
    return run


def episodes_of(seed: int) -> Episodes:
    """Over environments as fast as `seed` says, of which ten are open at most."""
    environments = TableEnvironments(lateness=1 + seed % 4, opens_with="321")
    return table_episodes(environments, max_open=10)


def trained(*runs: TableRun) -> list[list[bytes]]:
    return [[encode_group(group) for group in groups] for run in runs for groups in run.groups]


def validated(run: TableRun) -> list[tuple[int, float | None]]:
    return [(row["step"], row.get("val/reward")) for row in run.rows()]


@pytest.mark.parametrize("acts", [False, True], ids=["responses", "episodes"])
@pytest.mark.parametrize("split", SPLITS)
def test_steps_a_resume_and_the_other_steps_are_the_whole_run_to_the_bit(
    split: str, acts: bool, tmp_path: Path
) -> None:
    """After every step, at other speeds, with parked responses, open episodes and verdicts that are out, whether a validation is due
    behind it or not, and whether the run died before it or after; by the wall it is another run."""
    words = (*SPLITS[split], "loop.validation.every_steps=2")
    whole = table_run(config(tmp_path, "whole", *words), 1, acts=acts)
    assert whole.finished() == "done"
    parked = unjudged = 0
    for steps in range(1, STEPS):
        run = table_run(config(tmp_path, f"of-{steps}", *words), 1 + steps, acts=acts)
        run.loop.start()
        for _ in range(steps - 1):
            run.loop.step()
        run.engines.dies = WorkerLost("in phase sync") if steps % 3 else None
        with contextlib.suppress(WorkerLost):
            run.loop.step()
        (state, _) = run.train.saved[max(run.train.saved)]
        begun = [
            s for data in state["supply"]["making"] for s in decode_group(data, lambda index: ROWS[0]).samples
        ]
        parked += sum(s.status is Status.PARKED and len(s.response_tokens) > 0 for s in begun)
        unjudged += sum(s.status is not Status.PARKED and s.verdict is None for s in begun)
        again = run.resumed()
        again.loop.start()
        assert again.loop.run() == "done"
        assert trained(run, again) == trained(whole)
        assert torch.equal(again.train.table, whole.train.table)
        assert validated(again) == validated(whole)
    assert parked > 20 and unjudged > 20, "nothing was on its way"
    by_wall = table_run(config(tmp_path, "wall", *words), 2, wall=True, acts=acts)
    assert by_wall.finished() == "done"
    assert trained(by_wall) != trained(whole)


def test_an_update_takes_so_many_ticks_of_engines_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them, and what is trained is younger or other; the same number, and it is the same."""
    ways = []
    for number, ticks in enumerate((0, 3, 3)):
        monkeypatch.setattr(engine_time, "UPDATE_TICKS", ticks)
        run = table_run(config(tmp_path, f"run-{number}", *SPLITS["own"]), number)
        assert run.finished() == "done"
        ways.append(trained(run))
    assert ways[1] == ways[2] != ways[0]


def test_a_verdict_that_never_comes_is_named(tmp_path: Path) -> None:
    clock = EngineTime(deadline_seconds=0.0)
    clock.answered(["4.1"], rests=False)
    rewards = ScriptedRewards(mixed)
    rewards.silent = True
    with pytest.raises(RewardError, match=r"no verdict on sample 4\.1 within"):
        [clock.verdicts(rewards, 0.0) for _ in range(3)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("routing.replay=engine",), r"stream.clock = logical with routing.replay = engine"),
        (("rollout={dp: 2, tp: 1, expert_parallel: true}",), r"stream.clock = logical with rollout.dp = 2"),
    ],
)
def test_what_it_does_not_hold_for_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, "run", *words)
