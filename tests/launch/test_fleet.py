"""Which engines serve: survivable losses, replacements, and the message of the final error."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from mrl.errors import RolloutError, WorkerLost
from mrl.launch.workers.fleet import Fleet
from mrl.observe.phases import PhaseClock


class Processes:
    """Fake calls named by strings; finished ones have a value or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: dict[str, Any] = {}
        self.started: list[int] = []
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)

    def start(self, engine: int) -> Any:
        self.started.append(engine)
        return f"start {len(self.started)}", f"tell {len(self.started)}"

    def wait(self, calls: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        done = [call for call in calls if call in self.ended]
        return done, [call for call in calls if call not in done]

    def get(self, call: str, timeout: float) -> Any:
        if isinstance(value := self.ended[call], Exception):
            raise value
        return value

    def fleet(self, most: int, *, seconds: float = 60.0) -> Fleet:
        clock: Any = PhaseClock()
        return Fleet(3, clock, most=most, deadline_seconds=seconds, start=self.start)


def test_a_lost_engine_serves_again_when_it_was_brought_in(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch)
    fleet = processes.fleet(2)
    assert fleet.metrics() == {}
    message = fleet.replace(1, "engine 1 died")
    assert message == "engine 1 died; starting a replacement (1 of rollout.max_replacements = 2)"
    assert (fleet.serving, fleet.is_up, processes.started) == ([0, 2], False, [1])
    assert fleet.look() == {} and fleet.bring_in() == {}
    processes.ended |= {"start 1": None, "tell 1": [("address", "cpu", "digest")]}
    assert fleet.look() == {} and fleet.is_up and fleet.serving == [0, 2]
    assert fleet.bring_in() == {1: [("address", "cpu", "digest")]}
    assert fleet.serving == [0, 1, 2] and not fleet.is_up
    assert fleet.metrics() == {"rollout/engines_lost": 1.0, "rollout/engines": 3.0}


def test_a_start_that_fails_is_tried_again_and_the_end_names_the_first_cause(monkeypatch) -> None:
    processes = Processes(monkeypatch)
    fleet = processes.fleet(2)
    fleet.replace(0, "engine 0 died")
    processes.ended |= {"start 1": RolloutError("no memory"), "tell 1": AttributeError("engine")}
    assert fleet.look() == {0: "failed: RolloutError: no memory"}
    fleet.replace(0, "its replacement failed")
    assert fleet.look() == {} and processes.started == [0, 0]
    processes.ended |= {"start 2": None, "tell 2": RolloutError("gone")}
    assert fleet.look() == {0: "failed: RolloutError: gone"}
    with pytest.raises(
        WorkerLost, match=r"^engine 0 died; it failed again; rollout.max_replacements = 2 engines were"
    ):
        fleet.replace(0, "it failed again")


def test_one_that_is_up_and_dies_before_it_is_brought_in_is_lost_again(monkeypatch) -> None:
    processes = Processes(monkeypatch)
    fleet = processes.fleet(5)
    fleet.replace(0, "engine 0 died")
    processes.ended |= {"start 1": None, "tell 1": []}
    fleet.look()
    fleet.replace(0, "engine 0 died again")
    assert not fleet.is_up and fleet.serving == [1, 2]


def test_a_start_that_takes_too_long_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Processes(monkeypatch).fleet(5, seconds=-1.0)
    fleet.replace(2, "engine 2 died")
    assert fleet.look() == {2: "was not up within launch.start_deadline_seconds = -1 s"}


def test_without_replace_the_first_loss_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch)
    with pytest.raises(WorkerLost, match=r"^engine 0 died$"):
        processes.fleet(0).replace(0, "engine 0 died")
    assert not processes.started
