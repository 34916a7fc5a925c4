"""Workers are asked by their own methods: no name of one stands in a string."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import ray

from mrl.errors import WorkerLost
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


def test_what_the_pump_raises_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def pump() -> list:
        raise WorkerLost("engine 0 died in phase update")

    Waits(monkeypatch)
    calls = {"trainer rank 0": "forward"}
    with pytest.raises(WorkerLost, match="engine 0 died"):
        wait_all(calls, deadline_seconds=60, clock=PhaseClock(), meanwhile=pump)  # type: ignore[arg-type] words
