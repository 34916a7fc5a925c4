"""Workers are asked by their own methods: no name of one stands in a string."""

from __future__ import annotations

import ast
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
