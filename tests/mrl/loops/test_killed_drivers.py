"""Drivers of a stream of episodes, and the environments, get signals at random moments: the run is resumed,
no process is left, and `mrl audit` finds each prompt once. Only engines and trainer are a table."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mrl.agents.environment import Step
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.episode import Limits
from mrl.agents.pool import EnvironmentWorkers
from mrl.report.audit import audit, audit_text
from mrl.trajectories.environment_rollout import EpisodeRules
from tests.mrl.loops.table_policy import TableRun, config_of
from tests.support.table_environment import DigitRenderer

STEPS = 8
STREAM = ("loop.schedule=stream", "stream.max_staleness=2", f"loop.steps={STEPS}")
STREAM += ("loop.checkpoint={every_steps: 2, keep: 99}", "loop.phase_deadline_seconds=300")
RULES = EpisodeRules("game", DigitRenderer(), Limits(8, 200, 200, 4, 1), retries=50, format="json", tools={})
SECONDS = 800.0
SPAWNED = multiprocessing.get_context("spawn")
"""The fork server is the ranks' (tests/ranks.py): one per process, with its first user's imports."""


class Game:
    """One to four turns, each answered with a digit."""

    def reset(self, task: dict[str, Any], seed: int) -> str:
        self._dice, self._turns = random.Random(seed), 1 + seed % 4
        return ""

    def step(self, text: str, calls: Any) -> Step:
        time.sleep(0.01)
        self._turns -= 1
        return Step(str(self._dice.randint(0, 3)), reward=len(text) / 8, done=not self._turns)

    def close(self) -> None:
        pass


def drive(folder: Path) -> None:
    sys.stdout = sys.stderr = (folder / "log").open("a")
    states, specs = folder / "states", {"game": EnvironmentSpec(f"{__file__}:Game", {})}
    with EnvironmentWorkers(
        specs, Deadlines(reset_seconds=10.0, step_seconds=5.0), host_seconds=10.0
    ) as pool:
        config = config_of(folder, {"estimator": {"name": "grpo"}}, *STREAM)
        saved = sorted(path for path in states.iterdir() if path.suffix == ".pickle")
        state, table = pickle.loads(saved[-1].read_bytes()) if saved else ({"next_step": 0}, None)
        run = TableRun(
            config,
            first_step=state["next_step"],
            acts=lambda: {"environments": pool, "rules_of": lambda _: RULES},
        )
        run.engines.tokens_per_step, run.engines.at_once = 2, 20
        if table is not None:
            with torch.no_grad():
                run.train.table.copy_(table)
            run.loop.restore(state)
        keep_on_disk(run, states, waits_at=math.inf if saved else STEPS - 2)
        run.finished()
        run.close()


def keep_on_disk(run: TableRun, states: Path, waits_at: float) -> None:
    """Save checkpoints as files by a rename. From step `waits_at` on, wait for a signal."""
    commit = run.train.commit_checkpoint

    def committed() -> None:
        path, saved = run.train._saving
        partial = states / f"{path.name}.partial"
        partial.write_bytes(pickle.dumps(saved))
        if saved[0]["next_step"] >= waits_at:
            time.sleep(SECONDS)
        partial.rename(states / f"{path.name}.pickle")
        if not path.exists():
            commit()

    run.train.commit_checkpoint = committed  # type: ignore[method-assign]


def num_states(folder: Path) -> int:
    return len(list((folder / "states").glob("*.pickle")))


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def disturb(process: BaseProcess, dice: random.Random, *, spares_driver: bool) -> str:
    assert process.pid is not None
    members = family(process.pid)
    pids = [member.pid for member in dice.sample(members, min(2, len(members)))]
    pids += [] if spares_driver else [process.pid]
    if not pids:
        return "nobody"
    pid = dice.choice(pids)
    how = dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP))
    try:
        os.kill(pid, how)
        if how == signal.SIGSTOP:
            time.sleep(dice.uniform(0.1, 0.5))
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return "nobody"
    kind = "driver" if pid == process.pid else "host or guest"
    return f"{how.name} {kind}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "resumed"), [(1, 1), pytest.param(2, 12, marks=pytest.mark.slow)])
def test_each_prompt_once_over_random_signals(seed: int, resumed: int, tmp_path: Path) -> None:
    dice, disturbances, from_states = random.Random(seed), [], 0
    (tmp_path / "states").mkdir()
    deadline = time.monotonic() + SECONDS
    while True:
        process = SPAWNED.Process(target=drive, args=(tmp_path,))
        before = num_states(tmp_path)
        from_states += before > 0
        process.start()
        members, signals = list[psutil.Process](), 0
        while process.is_alive() and from_states <= resumed:
            process.join(dice.uniform(0.05, 1.0))
            members = family(process.pid) if process.is_alive() and process.pid else members
            spared = num_states(tmp_path) == before  # each start has to save something
            if process.is_alive() and not (spared and signals > 1):
                disturbances.append(disturb(process, dice, spares_driver=spared))
                signals += disturbances[-1] != "nobody"
        process.join(max(1.0, deadline - time.monotonic()))
        assert process.exitcode is not None, (tmp_path / "log").read_text()[-3000:]
        assert not psutil.wait_procs(members, timeout=30)[1], "environments outlived their driver"
        if process.exitcode == 0:
            break
        assert process.exitcode in (-signal.SIGKILL, -signal.SIGTERM), (tmp_path / "log").read_text()[-3000:]
    report = audit(tmp_path / "run")
    assert report.passes, f"{disturbances}: {audit_text(report)}"
    trained = [
        line.step for line in report.lines if not line.starts
    ]  # a start may find that nothing is left to do
    assert from_states > 0 and trained[-1] == STEPS, disturbances
    assert sum(line.starts and line.step > 1 for line in report.lines) > 0, disturbances
    assert not any(line["given_up"] for line in report.lines)
