"""Workers are called by their methods, never by a method name in a string."""

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
    """Ray only creates actors and runs functions on them (`__ray_call__`), so type checkers follow."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote":
            target = ast.unparse(node.func.value)
            assert target == "ray" or target.endswith(("__ray_call__", ")")), (
                f"{path}:{node.lineno}: {target}.remote"
            )
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "operator.methodcaller"):
            assert "worker" not in ast.unparse(node) and "actor" not in ast.unparse(node), (
                f"{path}:{node.lineno}"
            )


class Ended:
    """Fake calls named by strings; some fail with a Ray error, the others never end."""

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


GONE = PeerLost("engine 0, dp rank 0 could not continue without the other ranks of its engine: Timed out")
RANKS = {f"engine 0, dp rank {rank}": f"tick {rank}" for rank in range(3)}


@pytest.mark.parametrize(
    ("middle", "error", "words"),
    [
        (None, WorkerLost, "^engine 0, dp rank 1 kept others waiting in phase .*: PeerLost: "),
        (GONE, PeerLost, "^engine 0, dp rank 0, phase .*could not continue"),
        (NumericError("a token is NaN"), NumericError, "^engine 0, dp rank 1, phase .*a token is NaN"),
    ],
)
def test_of_ranks_that_fail_together_the_one_that_others_waited_for_is_named(
    middle, error, words, monkeypatch
) -> None:
    """Two ranks lost a hanging third one, or that one lost a peer too, or it has an error of its own."""
    Ended(monkeypatch, {"tick 0": GONE, "tick 2": GONE} | ({"tick 1": middle} if middle else {}))
    with pytest.raises(error, match=words):
        wait_all(RANKS, deadline_seconds=60, clock=PhaseClock())  # type: ignore[arg-type] words
