"""Errors of engines whose connections end or never begin: the first cause by name, and what is given up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import mrl.launch.workers.actor_log as actor_log
from mrl.config.load import load
from mrl.errors import RolloutError, WorkerLost
from mrl.launch.workers import rollout_group
from mrl.launch.workers.placement import Placement, Slot
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.loops.rollout_thread import RolloutThread, in_this_process
from mrl.observe.phases import PhaseClock
from mrl.rollout.engine_pool import EnginePool
from tests.launch.hybrid_runs import ChangingRewards
from tests.support.pretended_ray import PretendedRay

WORDS = ["run.name=r", "model.path=/m/Qwen3-30B-A3B", "data.train=/rows", "reward.kind=maths"]
WORDS += ["training.layout={ep: 1, dp: 2}"]
OWN = ["loop.schedule=stream", "launch.engine_slots=2", "rollout.max_replacements=1"]


class Generation:
    num_started_over = 3

    def __init__(self) -> None:
        self.lost: dict[int, tuple[str, str]] = {}
        self.stalled: list[int] = []
        self.given_up: list[int] = []
        self.on_take: Callable[[], None] = lambda: None
        """Called just before a death is known, because the connection ends first."""

    def take_lost(self) -> dict[int, tuple[str, str]]:
        self.on_take()
        lost, self.lost = self.lost, {}
        return lost

    def late(self, seconds: float) -> list[int]:
        return self.stalled

    def give_up(self, number: int, why: str) -> None:
        self.given_up.append(number)


class AnyWhere(Placement):
    def strategies(self, ranks: Iterable[int]) -> list[Any]:
        return [None for _ in ranks]


Made = tuple[RolloutGroup, Generation, list[int]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Made]:
    """Return a factory of groups with two engine slots; the list contains processes known to be gone."""
    PretendedRay().install(monkeypatch)
    monkeypatch.setattr(actor_log, "redirect", lambda folder, name: None)
    monkeypatch.setattr(rollout_group, "GRACE_SECONDS", 0.2)

    def made(*words: str) -> Made:
        config, gone, generation = load([], [*WORDS, *words]), list[int](), Generation()
        slots = tuple(Slot(slot, 0, str(slot)) for slot in range(config.num_slots))
        options: dict[str, Any] = {"environment": {}, "log_folder": str(tmp_path)}
        group = RolloutGroup(config, AnyWhere(None, slots), PhaseClock(), sleeps=False, **options)
        monkeypatch.setattr(group, "dead", lambda: gone)
        monkeypatch.setattr(group, "death", lambda number: f"{group.name(number)} died")
        monkeypatch.setattr(group, "_rollouts", generation)
        monkeypatch.setattr(group._fleet, "_start", lambda engine: ("start", "tell"))
        monkeypatch.setattr(group._fleet, "look", lambda seconds=0.0: {})
        return group, generation, gone

    return made


DP = ("rollout={dp: 2, expert_parallel: true}",)
BROKEN = "the engine closed its connection"


@pytest.mark.parametrize(
    ("words", "lost", "gone", "error", "message"),
    [
        ((), {1: (BROKEN, "")}, [1], WorkerLost, "^engine 1 died$"),
        ((), {1: (BROKEN, "")}, [], WorkerLost, f"^engine 1 failed in phase start_up: {BROKEN}$"),
        ((), {0: ("too long", "RolloutError")}, [], RolloutError, "^engine 0, phase start_up: too long$"),
        ((), {0: ("bug", "Exception")}, [], WorkerLost, "^engine 0 failed in phase start_up: bug$"),
        (DP, {0: ("waited", "PeerLost")}, [1], WorkerLost, "^engine 0, dp rank 1 died$"),
        (
            DP,
            {0: ("waited", "PeerLost")},
            [],
            WorkerLost,
            "^engine 0, dp rank 1 kept others waiting in phase",
        ),
    ],
)
def test_the_first_cause_ends_the_run(
    make: Callable[..., Made],
    words: tuple[str, ...],
    lost: dict[int, tuple[str, str]],
    gone: list[int],
    error: type[Exception],
    message: str,
) -> None:
    group, generation, dead = make(*words)
    generation.lost, generation.on_take = lost, lambda: dead.extend(gone)
    with pytest.raises(error, match=message):
        group.watch()


def test_a_run_that_survives_takes_elsewhere_what_a_lost_or_late_engine_had(
    make: Callable[..., Made],
) -> None:
    group, generation, dead = make(*OWN)
    generation.stalled = [1]
    group.watch()
    assert (generation.given_up, group.serving, group.num_lost) == ([1], [0], 1)
    assert group._clock.take()["rollout/started_over"] == 3
    generation.stalled, generation.lost = [], {1: (BROKEN, "")}
    group.watch()
    assert group.num_lost == 1, "its connection ended because it was given up"
    dead.append(0)
    with pytest.raises(
        WorkerLost, match=r"^engine 0 died; rollout.max_replacements = 1 engines were replaced before"
    ):
        group.watch()


def test_an_engine_that_cannot_be_reached_is_lost() -> None:
    """An engine that does not listen, or ends before its first message, has died since its start."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = [server.getsockname()[:2] for server in (silent, gone)]
        gone.close()
        make = in_this_process(
            lambda thread: EnginePool(["a", "b"], secret=b"", run_seed=0, on_lost=thread.note_lost),
            ChangingRewards(),
            run_seed=0,
        )
        thread = RolloutThread(make, PhaseClock(), deadline_seconds=60)
        with contextlib.closing(thread):
            threading.Thread(target=lambda: silent.accept()[0].close()).start()
            for number, address in enumerate(addresses):
                thread.connect(number, address)
            lost = thread.take_lost()
    assert set(lost) == {0, 1} and all("could not be reached" in why for why, _ in lost.values())
