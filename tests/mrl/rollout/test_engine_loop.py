"""The engine's thread with a stub engine: order, failure, end (real engine: test_engine_pool.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.errors import RolloutError
from mrl.rollout.engine import PauseReport
from mrl.rollout.engine_loop import EngineLoop
from mrl.rollout.request import Completion
from mrl.samples import Status

SECONDS = 60.0


class Stub:
    """Work of so many steps, each of which waits for permission, with a completion at its end."""

    def __init__(self) -> None:
        self.part = SimpleNamespace(dp=1)
        self.left, self.did = 0, list[str]()
        self.allowed = threading.Semaphore(0)
        self.steps = threading.Event()
        self.ended: list[Completion] = []

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def vote(self, *, wants_pause: bool) -> tuple[bool, bool]:
        return self.has_work, wants_pause

    def step(self) -> list[Completion]:
        self.steps.set()
        assert self.allowed.acquire(timeout=SECONDS)
        self.steps.clear()
        self.left -= 1
        self.did.append("step")
        return [] if self.left else [Completion.empty("0.0", Status.FINISHED)]

    def take_ended(self) -> list[Completion]:
        ended, self.ended = self.ended, []
        return ended

    def pause(self) -> PauseReport:
        self.did.append("pause")
        self.ended = [Completion.empty("0.1", Status.FINISHED)]
        return PauseReport(3, 9)

    def resume(self, *, training: bool) -> None:
        self.did.append(f"resume {training}")

    def close(self) -> None:
        self.did.append("close")


class Heard:
    def __init__(self) -> None:
        self.completions: list[tuple[str, bool]] = []
        self.errors: list[BaseException] = []
        self.failing = threading.Event()

    def completed(self, completions: Sequence[Completion], *, idle: bool) -> None:
        self.completions += [(c.request_id, idle) for c in completions]

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)
        self.failing.set()


@pytest.fixture
def made() -> Iterator[tuple[EngineLoop, Any, Heard]]:
    stub, heard = Stub(), Heard()
    loop: Any = EngineLoop(lambda: stub, heard)  # type: ignore[arg-type,return-value]
    loop.start()
    loop.ready.result(SECONDS)
    yield loop, stub, heard
    stub.allowed.release(100)
    loop.close(SECONDS)
    assert not loop.is_alive() and stub.did[-1] == "close"


def work(stub: Any, steps: int) -> None:
    stub.left = steps


def test_commands_run_in_order_between_two_steps(made: tuple[EngineLoop, Any, Heard]) -> None:
    """Nothing runs before `resume`; commands that come during a step run before the next one."""
    loop, stub, heard = made
    loop.call(lambda engine: work(stub, 3)).result(SECONDS)
    assert stub.did == []
    loop.resume()
    assert stub.steps.wait(SECONDS) and loop.is_busy
    futures = [loop.call(lambda engine, n=n: stub.did.append(str(n))) for n in range(3)]
    assert not any(future.done() for future in futures)
    stub.allowed.release()
    for future in futures:
        future.result(SECONDS)
    stub.allowed.release(2)
    while loop.call(lambda engine: stub.left).result(SECONDS):
        pass
    loop.pause().result(SECONDS)
    assert stub.did == ["resume True", "step", "0", "1", "2", "step", "step", "pause"] and loop.num_steps == 3
    assert heard.completions == [("0.0", True), ("0.1", True)] and not heard.errors


def test_a_pause_comes_after_the_step_under_way_and_lasts(made: tuple[EngineLoop, Any, Heard]) -> None:
    """Its completions are reported before the pause is done; further pauses and commands are answered."""
    loop, stub, heard = made
    work(stub, 5)
    loop.resume(training=False)
    assert stub.steps.wait(SECONDS)
    both = loop.pause(), loop.pause()
    assert not both[0].done()
    stub.allowed.release(100)
    assert [future.result(SECONDS) for future in both] == [PauseReport(3, 9)] * 2
    assert heard.completions == [("0.1", True)]
    assert loop.call(lambda engine: stub.left).result(SECONDS) == 4
    assert stub.did == ["resume False", "step", "pause"] and loop.num_steps == 1


def test_a_command_that_fails_is_its_callers(made: tuple[EngineLoop, Any, Heard]) -> None:
    loop, _, heard = made
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 / 0).result(SECONDS)
    assert loop.call(lambda engine: 5).result(SECONDS) == 5 and not heard.errors


def test_after_a_step_that_fails_nothing_is_done(made: tuple[EngineLoop, Any, Heard]) -> None:
    """It is reported once; earlier and later calls fail with it."""
    loop, stub, heard = made

    def step() -> list[Completion]:
        stub.steps.set()
        assert stub.allowed.acquire(timeout=SECONDS)
        raise RuntimeError("no memory")

    stub.step = step
    work(stub, 5)
    loop.resume()
    assert stub.steps.wait(SECONDS)
    futures: list[Any] = []
    stub.allowed.release()
    assert heard.failing.wait(SECONDS)
    futures += [loop.pause(), loop.call(lambda engine: 5), loop.pause()]
    for future in futures:
        with pytest.raises(RolloutError, match="the engine failed before: RuntimeError: no memory"):
            future.result(SECONDS)
    assert [str(error) for error in heard.errors] == ["no memory"]


def test_a_pause_that_fails_is_told(made: tuple[EngineLoop, Any, Heard]) -> None:
    loop, stub, heard = made

    def vote(*, wants_pause: bool) -> tuple[bool, bool]:
        raise RuntimeError("a peer is gone")

    stub.vote = vote
    with pytest.raises(RolloutError, match="a peer is gone"):
        loop.pause().result(SECONDS)
    assert heard.failing.wait(SECONDS)


def test_an_engine_that_does_not_start_says_why() -> None:
    def make() -> Any:
        raise ValueError("no such model")

    loop = EngineLoop(make, Heard())
    loop.start()
    with pytest.raises(ValueError, match="no such model"):
        loop.ready.result(SECONDS)
    loop.join(SECONDS)
    assert not loop.is_alive()
