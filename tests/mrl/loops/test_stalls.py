"""A stream that stalls or loses a worker reports its oldest group: state, turn, environment or engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrl.agents.answer import EnvironmentResult
from mrl.errors import RolloutError, WorkerLost
from tests.mrl.loops.table_policy import TableRun, config_of
from tests.support.table_environment import TableEnvironments, table_episodes

STREAM = ("loop.schedule=stream", "stream.max_staleness=1")
OWN = (*STREAM, "launch.engine_slots=1", "rollout.tp=1")


def of_episodes(folder: Path, environments: TableEnvironments) -> TableRun:
    config = config_of(folder, {"estimator": {"name": "grpo"}}, *STREAM, "loop.phase_deadline_seconds=0.2")
    return TableRun(config, acts=lambda: table_episodes(environments))


def test_an_environment_that_is_silent_is_named_with_its_turn(tmp_path: Path) -> None:
    environments = TableEnvironments()
    run = of_episodes(tmp_path, environments)
    run.loop.start()
    poll = environments.poll

    def silent_later(timeout_seconds: float) -> list[EnvironmentResult]:
        """Answer only the request that opens an episode."""
        return [answer for answer in poll(timeout_seconds) if not answer.turn]

    environments.poll = silent_later  # type: ignore[method-assign]
    with pytest.raises(
        RolloutError, match=r"oldest of 8 groups in flight is 0, making: \d responses missing"
    ) as caught:
        run.loop.step()
    assert re.search(r"first: 0\.\d at turn [1-9], waiting for its environment", str(caught.value))


def test_an_engine_that_is_silent_is_named_with_the_turn(tmp_path: Path) -> None:
    run = of_episodes(tmp_path, TableEnvironments())
    run.engines.stops_after = 0
    run.loop.start()
    with pytest.raises(
        RolloutError, match=r"first: 0\.0 at turn 0, on the table; 0\.1 at turn 0, on the table"
    ):
        run.loop.step()


@pytest.mark.parametrize("words", [STREAM, OWN], ids=["shared", "own"])
def test_a_lost_worker_ends_the_run_with_the_oldest_group(words: tuple[str, ...], tmp_path: Path) -> None:
    """During the update: engines with their own slots have begun a response, shared ones are idle."""
    run = TableRun(config_of(tmp_path, {}, *words))
    run.engines.tokens_per_step, run.engines.at_once, run.engines.step_seconds = 1, 20, 0.01
    run.loop.start()
    run.train.dies = WorkerLost("trainer rank 0 died in phase update")
    with pytest.raises(
        WorkerLost, match=r"^trainer rank 0 died in phase update; the oldest of 4 groups in flight is 4, "
    ) as caught:
        run.loop.step()
    assert "admitted at version 0, the engines serve 0" in str(caught.value)
