"""Rounds over scripted engines and rewards: what is requested, the order of groups, and who is blamed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mrl.errors import MrlError, RewardError, RolloutError, WorkerLost
from mrl.loops import event_thread, rollout_thread
from mrl.loops.event_thread import EventThread
from mrl.loops.group_filter import trainable
from mrl.observe.phases import PhaseClock
from mrl.samples import Group, Prompt, Status
from tests.mrl.loops.scripted import Scripted
from tests.support.runs import until
from tests.support.samples import make_groups, make_sample, verdict_of

PROMPTS = [Prompt(n, np.array([n], np.int32), "", None) for n in (5, 3, 8)]


def test_groups_come_back_whole_and_in_the_prompts_order(tmp_path: Path) -> None:
    """Verdicts come in another order; all of a round are requested together, each with its own seed."""
    script = Scripted(tmp_path, {}, reward=lambda prompt, sample: prompt + sample / 10)
    groups = script.rollouts.groups(PROMPTS, script.sampling)
    assert [group.prompt for group in groups] == PROMPTS
    for group in groups:
        assert [s.sample_index for s in group.samples] == [0, 1, 2, 3]
        for sample in group.samples:
            assert sample.prompt_index == group.prompt.index and sample.response_text == "text"
            assert sample.verdict is not None
            assert sample.verdict.value == group.prompt.index + sample.sample_index / 10
    request_ids = [request.request_id for request in script.engines.asked]
    assert request_ids == [f"{p.index}.{n}" for p in PROMPTS for n in range(4)]
    assert len({request.seed for request in script.engines.asked}) == 12
    assert script.rewards.flushed == {5, 3, 8}
    assert script.clock.take().keys() == {"time/generate_seconds", "time/reward_seconds"}


def test_samples_without_a_reward_stay_in_their_group_and_are_not_trained_on(tmp_path: Path) -> None:
    script = Scripted(tmp_path, {}, reward=lambda prompt, sample: None if sample == 1 else 1.0)
    (group,) = script.rollouts.groups(PROMPTS[:1], script.sampling)
    assert len(group.samples) == 4
    (kept,) = trainable([group])
    assert [s.sample_index for s in kept.samples] == [0, 2, 3]


@pytest.mark.parametrize("status", list(Status))
def test_only_finished_and_truncated_responses_are_trained_on(status: Status) -> None:
    groups = make_groups([make_sample(status=status, verdict=verdict_of(1.0))])
    assert bool(trainable(groups)) == (status in (Status.FINISHED, Status.TRUNCATED))
    assert trainable([dataclasses.replace(groups[0], samples=(make_sample(),))]) == []


@pytest.mark.parametrize("silent", ["engines", "rewards"])
@pytest.mark.parametrize("way", ["groups", "in turn"])
def test_who_does_not_answer_in_time_is_named(silent: str, way: str, tmp_path: Path) -> None:
    script = Scripted(tmp_path, {})
    error: type[MrlError] = RolloutError
    message = (
        r"12 responses of 3 prompts "
        r"\(first: \['5.0 on the script', '5.1 on the script', '5.2 on the script'\]\)"
    )
    if silent == "engines":
        script.engines.answers = lambda request: False
    else:
        script.rewards.answers = lambda sample_id: False
        error, message = RewardError, r"12 verdicts of 3 prompts .* in phase reward"
    rollouts = script.thread(deadline_seconds=0.2)
    ask = rollouts.groups if way == "groups" else lambda *args: list(rollouts.generate_in_order(*args))
    with pytest.raises(error, match=message):
        ask(PROMPTS, script.sampling)


def told(group: Group) -> tuple[object, ...]:
    return group.prompt, [(s.sample_id, s.response_text, s.verdict, s.status) for s in group.samples]


def test_in_turn_a_group_comes_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    """Yields what `groups` returns, one by one: the first while others are unanswered."""
    script, other = (Scripted(tmp_path, {}, reward=lambda p, s: p + s / 10) for _ in range(2))
    script.engines.answers = lambda request: not request.request_id.startswith("8.")
    groups = script.rollouts.generate_in_order(PROMPTS, script.sampling)
    first = [next(groups), next(groups)]
    assert [told(g) for g in first] == [told(g) for g in other.rollouts.groups(PROMPTS[:2], other.sampling)]
    assert list(other.rollouts.generate_in_order([], other.sampling)) == []


@pytest.mark.parametrize(("room", "prompts"), [(1, 1), (20, 5)])
def test_in_turn_prompts_are_read_when_there_is_room(
    room: int, prompts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits samples in flight, four per prompt, with at least one prompt; reads all hundred in the end."""
    monkeypatch.setattr(rollout_thread, "MAX_IN_FLIGHT", room)
    script, read = Scripted(tmp_path, {}), list[int]()

    def rows() -> Iterator[Prompt]:
        for index in range(100):
            read.append(index)
            yield Prompt(index, np.array([index], np.int32), "", None)

    groups = list(script.rollouts.generate_in_order(rows(), script.sampling))
    assert [group.prompt.index for group in groups] == read == list(range(100))
    read.clear()
    script.rewards.answers = lambda sample_id: False
    with pytest.raises(RewardError):
        list(script.thread(deadline_seconds=0.2).generate_in_order(rows(), script.sampling))
    assert len(read) == prompts


def test_a_death_keeps_the_name_of_its_phase(tmp_path: Path) -> None:
    script = Scripted(tmp_path, {})
    script.engines.error = WorkerLost("engine 0 died in phase generate")
    with pytest.raises(WorkerLost, match="engine 0 died"):
        script.rollouts.groups(PROMPTS, script.sampling)
    assert script.clock.current == "generate"


def test_reward_workers_that_end_the_run_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error when samples are submitted, or by their check while none are."""
    script = Scripted(tmp_path, {})

    def lost(pairs: object) -> None:
        raise WorkerLost("rewards of node 1 died")

    monkeypatch.setattr(script.rewards, "submit_all", lost)
    with pytest.raises(WorkerLost, match="rewards of node 1"):
        script.rollouts.groups(PROMPTS, script.sampling)
    other = Scripted(tmp_path, {})
    other.rewards.answers = lambda sample_id: False
    monkeypatch.setattr(other.rewards, "check", lambda: lost(()))
    with pytest.raises(WorkerLost, match="rewards of node 1"):
        other.rollouts.groups(PROMPTS, other.sampling)


@pytest.fixture
def thread() -> Iterator[EventThread]:
    made = EventThread("events", PhaseClock())
    yield made
    made.close()


def test_listeners_look_after_workers_while_the_caller_waits(
    thread: EventThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener's error ends the wait; the time counts as waited."""
    monkeypatch.setattr(event_thread, "CHECK_SECONDS", 0.02)
    looks: list[str] = []

    def look(event: str) -> None:
        looks.append(event)
        if len(looks) == 5:
            raise WorkerLost("trainer rank 0 died")

    thread.clock.listeners.append(look)  # type: ignore[arg-type]
    with pytest.raises(WorkerLost, match="trainer rank 0"):
        thread.do(asyncio.sleep(30))
    assert looks == ["wait"] * 5 and thread.clock.take_waited() > 0.08
    thread.clock.listeners.clear()


def test_a_failure_in_the_loop_is_raised_by_the_call_under_way_and_the_next(thread: EventThread) -> None:
    threading.Timer(0.1, lambda: thread.fail(RolloutError("no store has room"))).start()
    for _ in range(2):
        with pytest.raises(RolloutError, match="no store has room"):
            thread.do(asyncio.sleep(30))


def test_a_call_that_is_late_is_cancelled_and_told(thread: EventThread) -> None:
    ended: list[float] = []

    async def late() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(time.monotonic())

    with pytest.raises(RolloutError, match=r"did not respond within 0\.1 s in phase start_up"):
        thread.do(late(), 0.1)
    until(lambda: ended)  # it was cancelled


def test_other_threads_do_not_count_as_the_drivers_waits(thread: EventThread) -> None:
    def wait() -> None:
        with thread.clock.waiting():
            time.sleep(0.05)

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    assert thread.clock.take_waited() == 0.0


def test_processor_seconds_are_the_threads_own(thread: EventThread) -> None:
    before = thread.cpu_seconds()
    thread.ask(lambda: sum(range(3_000_000)))
    assert thread.cpu_seconds() > before
