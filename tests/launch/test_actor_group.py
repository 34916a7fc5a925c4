"""Workers are called by their methods, never by a method name in a string."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayTaskError

from mrl import compile_cache
from mrl.errors import MrlError, NumericError, PeerLost, WorkerLost
from mrl.launch.workers import actor_group, compile_watch
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


class Clock:
    """A clock that moves 10 s each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 10.0
        return self.now


def test_a_start_that_compiles_is_waited_for_and_one_that_does_not_is_ended(monkeypatch, tmp_path) -> None:
    """Compiled files grow for some deadlines; then one worker is up, whose report goes, and one hangs."""
    Ended(monkeypatch, {})
    clock, report = Clock(), tmp_path / "engine-0.compiled"
    monkeypatch.setattr(actor_group, "time", clock)

    def progress() -> dict[str, str]:
        if clock.now < 2000:
            report.write_text(str(clock.now))
        else:
            report.unlink(missing_ok=True)
        return compile_watch.reports(tmp_path)

    words = "engine 0 did not respond within 600 s"
    with pytest.raises(WorkerLost, match=words):
        wait_all({"engine 0": "call"}, deadline_seconds=600, clock=PhaseClock(), progress=progress)  # type: ignore[dict-item]
    assert 2400 < clock.now < 2700, "600 s after the last deadline at which there was progress"
    silent = Clock()
    monkeypatch.setattr(actor_group, "time", silent)
    with pytest.raises(WorkerLost, match=words):
        wait_all({"engine 0": "call"}, deadline_seconds=600, clock=PhaseClock())  # type: ignore[dict-item]
    assert silent.now < 700


def test_compiled_files_of_a_node_are_counted_and_reported(monkeypatch, tmp_path) -> None:
    """Folders inside others are counted once; a worker without new files reports nothing."""
    monkeypatch.setattr(compile_watch, "LOOK_SECONDS", 0.01)
    cache, logs = tmp_path / "torch", tmp_path / "logs"
    logs.mkdir()
    names = {compile_cache.VARIABLE: cache} | {
        name: cache / sub for name, sub in compile_cache.OF_OTHERS.items()
    }
    for name, folder in names.items():
        folder.mkdir(exist_ok=True)
        (folder / "old").write_text("")
        monkeypatch.setenv(name, str(folder))
    monkeypatch.delenv(compile_cache.EXTENSIONS, raising=False)
    assert compile_watch.num_compiled(os.environ) == 4
    with compile_watch.reporting(str(logs), "engine-0"):
        assert compile_watch.reports(logs) == {}
        (cache / "triton" / "new").write_text("")
        while compile_watch.reports(logs) != {"engine-0.compiled": "1"}:  # the test's time limit ends this
            pass
    assert list(logs.iterdir()) == []


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
