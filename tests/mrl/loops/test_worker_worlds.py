"""Async worlds keep their promises with killed rollout workers; planted faults are seen."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.trajectories import remote_rollouts
from mrl.trajectories.remote_rollouts import RemoteGroup, RemoteWorker, WorkerEngines
from tests.mrl.loops.worker_worlds import Driven, WorkerWorld


@pytest.mark.timeout(1800)  # 3,000 worlds take eight minutes of a processor
@pytest.mark.parametrize("count", [80, pytest.param(3000, marks=pytest.mark.slow)])
def test_every_world_of_workers_keeps_its_promises(count: int) -> None:
    trained = lost = killed = 0
    for seed in range(count):
        world = WorkerWorld(seed)
        world.run()
        trained, lost = trained + len(world.trained), lost + world.num_lost
        killed += world.num_killed
    assert trained > 5 * count and lost > count and killed > count / 4, "the worlds are too quiet"


def test_a_group_that_comes_back_to_its_worker_begins_after_it_was_dropped_there() -> None:
    """A group returns while the message that it is made elsewhere is still in flight."""
    WorkerWorld(500).run()


class ForgetsWhatCame(RemoteGroup):
    """Restarts elsewhere without the partial responses."""

    def begin_again(self) -> None:
        if self.number >= 0:
            self.records = ()
        super().begin_again()


class TrustsLostWorkers(WorkerEngines):
    """Does not wait for the engines of a lost worker."""

    async def _pause(self, worker: RemoteWorker, snapshot: bool) -> Any:
        worker.is_released.set()
        return await super()._pause(worker, snapshot)


class WakesNobody(WorkerEngines):
    """Never resumes a replacement worker."""

    async def connect_known(self, worker: RemoteWorker) -> None:
        runs, self.runs = self.runs, False
        await super().connect_known(worker)
        self.runs = runs


class LeavesGroups(Driven):
    """Leaves groups at a worker without engines."""

    def _engines_changed(self) -> None:
        if self.engines.serving:
            self._serves.set()


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str | None]] = {
    "what had come is forgotten": ({"RemoteGroup": ForgetsWhatCame}, {}, AssertionError, "drawn twice"),
    "engines of lost workers run on": (
        {"WorkerEngines": TrustsLostWorkers},
        {},
        AssertionError,
        "running engine",
    ),
    "a new worker is not resumed": ({"WorkerEngines": WakesNobody}, {}, TimeoutError, None),
    "groups stay without an engine": (
        {},
        {"rollouts": LeavesGroups, "kills_workers": False},
        TimeoutError,
        None,
    ),
}
"""Name -> (planted fault, options of the worlds, how they end)."""


@pytest.mark.parametrize(("planted", "options", "error", "message"), FAULTS.values(), ids=FAULTS)
def test_the_worlds_of_workers_see_a_fault(
    planted: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, faulty in planted.items():
        monkeypatch.setattr(remote_rollouts, name, faulty)
    with pytest.raises(error, match=message):
        run_worker_worlds(300, **options)


def run_worker_worlds(count: int, **options: Any) -> None:
    for seed in range(count):
        WorkerWorld(seed, **options).run()
