"""Workers are asked by their own methods: no name of one stands in a string."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayTaskError

from mrl.errors import MrlError, NumericError, PeerLost, WorkerLost
from mrl.launch.workers import actor_group
from mrl.launch.workers.actor_group import wait_all
from mrl.observe.phases import PhaseClock

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("launch/workers", "launch/commands", "mrl/loops")
    for path in (ROOT / folder).glob("*.py")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_method_of_a_worker_is_named_by_a_string(path: Path) -> None:
    """Ray is asked to make actors and to run functions of them (`__ray_call__`), which a type checker follows."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote":
            asked = ast.unparse(node.func.value)
            assert asked == "ray" or asked.endswith(("__ray_call__", ")")), (
                f"{path}:{node.lineno}: {asked}.remote"
            )
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "operator.methodcaller"):
            assert "worker" not in ast.unparse(node) and "actor" not in ast.unparse(node), (
                f"{path}:{node.lineno}"
            )


class Waits:
    """ray.wait of calls that are words; the trainer's is done after three waits that do not return at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[list[str]] = []
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", lambda call, timeout: call.upper())

    def wait(self, calls: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        if timeout:
            self.waited.append(calls)
        done = [call for call in calls if call == "forward" and len(self.waited) == 3]
        return done, [call for call in calls if call not in done]


def test_whoever_waits_pumps_and_waits_for_what_the_pump_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, polls = Waits(monkeypatch), iter(["poll 0", "poll 1", "poll 2"])
    calls = {"trainer rank 0": "forward"}
    found = wait_all(calls, deadline_seconds=60, clock=PhaseClock(), meanwhile=lambda: [next(polls)])  # type: ignore[arg-type] words
    assert found == {"trainer rank 0": "FORWARD"}
    assert waits.waited == [["forward", f"poll {number}"] for number in range(3)]


def test_a_call_that_the_pump_leaves_where_it_ended_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.wait gives any one of those that have ended; here the pump's before the trainer's."""
    monkeypatch.setattr(
        ray, "wait", lambda calls, num_returns, timeout: (sorted(calls)[:1], sorted(calls)[1:])
    )
    pumps: list[str] = []

    def pump() -> list[str]:
        pumps.append("a tick that nobody takes")
        assert len(pumps) < 5, "the trainer's call has ended and is never seen"
        return pumps[:1]

    limit = time.monotonic() + 60
    assert actor_group._one_ends(["forward"], limit, PhaseClock(), pump)
    assert len(pumps) == 2


def test_what_the_pump_raises_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def pump() -> list:
        raise WorkerLost("engine 0 died in phase update")

    Waits(monkeypatch)
    calls = {"trainer rank 0": "forward"}
    with pytest.raises(WorkerLost, match="engine 0 died"):
        wait_all(calls, deadline_seconds=60, clock=PhaseClock(), meanwhile=pump)  # type: ignore[arg-type] words


class Ended:
    """Calls that are words; some fail as Ray says it, the others never end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: dict[str, MrlError]) -> None:
        self._failures = failures
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(actor_group, "GRACE_SECONDS", 0.2)

    def wait(self, calls: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        done = [call for call in calls if call in self._failures]
        return done, [call for call in calls if call not in done]

    def get(self, call: str, timeout: float) -> None:
        raise RayTaskError("tick", "traceback", self._failures[call])


GONE = PeerLost("engine 0, dp rank 0 could not go on without the other ranks of its engine: Timed out")
RANKS = {f"engine 0, dp rank {rank}": f"tick {rank}" for rank in range(3)}


def test_a_rank_that_others_waited_for_is_named_and_not_those_that_waited(monkeypatch) -> None:
    Ended(monkeypatch, {"tick 0": GONE, "tick 2": GONE})
    with pytest.raises(WorkerLost, match=r"^engine 0, dp rank 1 kept others waiting in phase .*: PeerLost: "):
        wait_all(RANKS, deadline_seconds=60, clock=PhaseClock())  # type: ignore[arg-type] words


def test_where_every_rank_lost_another_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Ended(monkeypatch, dict.fromkeys(RANKS.values(), GONE))
    with pytest.raises(PeerLost, match=r"^engine 0, dp rank 0, phase .*could not go on"):
        wait_all(RANKS, deadline_seconds=60, clock=PhaseClock())  # type: ignore[arg-type] words


def test_a_ranks_own_error_goes_before_what_follows_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = NumericError("a token is NaN")
    Ended(monkeypatch, {"tick 0": GONE, "tick 1": own, "tick 2": GONE})
    with pytest.raises(NumericError, match=r"^engine 0, dp rank 1, phase .*a token is NaN"):
        wait_all(RANKS, deadline_seconds=60, clock=PhaseClock())  # type: ignore[arg-type] words
