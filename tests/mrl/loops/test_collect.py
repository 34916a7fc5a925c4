"""A round over scripted engines and reward workers: what is asked, in which order things come back, and who is blamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mrl.errors import RewardError, RolloutError, WorkerLost
from mrl.loops import collect
from mrl.loops.collect import sampling_of, trainable
from mrl.observe import phases
from mrl.rollout.request import Round
from mrl.samples import Group, Prompt, Status, Verdict
from tests.mrl.loops.scripted import Scripted, ScriptedRewards, ScriptedRollout
from tests.support.samples import make_groups, make_sample, verdict_of

PROMPTS = [Prompt(n, np.array([n], np.int32), "", None) for n in (5, 3, 8)]


def test_groups_come_back_whole_and_in_the_prompts_order(tmp_path: Path) -> None:
    """Responses arrive last first and verdicts in an order of their own; each finds its sample."""
    script = Scripted(tmp_path, {}, reward=lambda prompt, sample: prompt + sample / 10)
    sampling = sampling_of(script.config)
    groups = script.collector.round(PROMPTS, sampling)
    assert [group.prompt for group in groups] == PROMPTS
    for group in groups:
        assert [s.sample_index for s in group.samples] == [0, 1, 2, 3]
        for sample in group.samples:
            assert sample.prompt_index == group.prompt.index and sample.response_text == "text"
            assert sample.verdict is not None
            assert sample.verdict.value == group.prompt.index + sample.sample_index / 10
    (requested,) = script.rollout.rounds
    requests = requested.requests()
    assert len(requests) == len(requested) == 12, "all of a round are handed in together"
    assert len({request.seed for request in requests}) == 12
    seconds = script.clock.take()
    assert seconds.keys() == {"time/generate_seconds", "time/reward_seconds"}


def test_samples_without_a_reward_stay_in_their_group_and_are_not_trained_on(tmp_path: Path) -> None:
    script = Scripted(tmp_path, {}, reward=lambda prompt, sample: None if sample == 1 else 1.0)
    (group,) = script.collector.round(PROMPTS[:1], sampling_of(script.config))
    assert len(group.samples) == 4
    (kept,) = trainable([group])
    assert [s.sample_index for s in kept.samples] == [0, 2, 3]


@pytest.mark.parametrize("status", list(Status))
def test_only_finished_and_truncated_responses_are_trained_on(status: Status) -> None:
    groups = make_groups([make_sample(status=status, verdict=verdict_of(1.0))])
    assert bool(trainable(groups)) == (status in (Status.FINISHED, Status.TRUNCATED))
    assert trainable([dataclasses.replace(groups[0], samples=(make_sample(),))]) == []


@pytest.mark.parametrize("silent", ["rollout", "rewards"])
def test_who_does_not_answer_in_time_is_named(silent: str, tmp_path: Path) -> None:
    """No second passes: the deadline is over when the first answer comes back with too little."""
    script = Scripted(tmp_path, {})
    if silent == "rollout":
        script.rollout.silent, error = True, RolloutError
        message = r"12 responses of 3 prompts \(first: \['5.0 on the script', '5.1 on the script', '5.2 on the script'\]\) .* in phase generate"
    else:
        script.rewards.silent, error = True, RewardError
        script.rollout = ScriptedRollout(at_once=12)
        message = r"12 verdicts of 3 prompts .* in phase reward"
    collector = script.collector_of(deadline_seconds=-1.0)
    with pytest.raises(error, match=message):
        collector.round(PROMPTS, sampling_of(script.config))


class Queue(ScriptedRollout):
    """Takes requests at any time, and answers the oldest first."""

    def submit(self, asked: Iterable[Round]) -> None:
        for requested in asked:
            self.rounds.append(requested)
            self._open = [*reversed(requested.requests()), *self._open]

    @property
    def num_open(self) -> int:
        return len(self._open)


class Fair(ScriptedRewards):
    """The oldest first."""

    num_given = 0

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        self._waiting.reverse()
        verdicts = super().collect(timeout_seconds)
        self._waiting.reverse()
        self.num_given += len(verdicts)
        return verdicts


def in_turn(
    script: Scripted, prompts: Iterable[Prompt], *, deadline_seconds: float = 60.0
) -> Iterator[Group]:
    """Four samples of each."""
    collector = script.collector_of(deadline_seconds=deadline_seconds)
    return collector.in_turn(prompts, sampling_of(script.config))


def test_in_turn_a_group_comes_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    """What `round` gives, one by one: the first while others are not answered."""
    script, other = (Scripted(tmp_path, {}, reward=lambda p, s: p + s / 10) for _ in range(2))
    script.rollout, script.rewards = (queue := Queue(at_once=1)), Fair(script.rewards.reward)
    found = [(group, queue.num_open) for group in in_turn(script, PROMPTS)]
    assert [left for _, left in found] == [7, 3, 0]
    whole = other.collector.round(PROMPTS, sampling_of(other.config))
    assert [told(group) for group, _ in found] == [told(group) for group in whole]
    assert list(in_turn(script, [])) == []


def told(group: Group) -> tuple[object, ...]:
    return group.prompt, [(s.sample_id, s.response_text, s.verdict, s.status) for s in group.samples]


@pytest.mark.parametrize(("room", "most"), [(1, 4), (20, 20)])
def test_in_turn_prompts_are_asked_when_there_is_room(
    room: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred of four samples: so many in the making at a time, and one prompt's at least."""
    monkeypatch.setattr(collect, "AT_ONCE", room)
    script, in_making = Scripted(tmp_path, {}), list[int]()
    script.rollout, script.rewards = (queue := Queue()), (rewards := Fair(script.rewards.reward))
    submit = queue.submit

    def counted(asked: Iterable[Round]) -> None:
        submit(asked)
        in_making.append(sum(map(len, queue.rounds)) - rewards.num_given)

    monkeypatch.setattr(queue, "submit", counted)
    prompts = (Prompt(n, np.array([n], np.int32), "", None) for n in range(100))
    groups = list(in_turn(script, prompts))
    assert [group.prompt.index for group in groups] == list(range(100))
    assert {len(group.samples) for group in groups} == {4} and max(in_making) == most


@pytest.mark.parametrize("silent", ["nobody", "rollout", "rewards"])
@pytest.mark.parametrize("way", ["round", "in turn"])
def test_in_turn_the_deadline_is_from_one_answer_to_the_next(
    way: str, silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes a second of a clock that nothing else moves; twelve responses and verdicts come one a look."""
    script, now = Scripted(tmp_path, {}), [0.0]
    monkeypatch.setattr(collect.time, "monotonic", lambda: now[0])
    script.rollout = ScriptedRollout(at_once=1)
    for each, look in ((script.rollout, "ended"), (script.rewards, "collect")):
        monkeypatch.setattr(each, look, slow(getattr(each, look), now))
    script.rollout.silent, script.rewards.silent = silent == "rollout", silent == "rewards"
    collector, sampling = script.collector_of(deadline_seconds=5.0), sampling_of(script.config)
    if way == "in turn" and silent == "nobody":
        assert len(list(collector.in_turn(PROMPTS, sampling))) == 3 and now[0] > 5.0
        return
    awaited = "verdicts" if silent == "rewards" and way == "in turn" else "responses"
    with pytest.raises((RolloutError, RewardError), match=f"{awaited} of 3 prompts .* did not arrive within"):
        collector.round(PROMPTS, sampling) if way == "round" else list(collector.in_turn(PROMPTS, sampling))


def slow[**P, R](look: Callable[P, R], now: list[float]) -> Callable[P, R]:
    def later(*arguments: P.args, **named: P.kwargs) -> R:
        now[0] += 1.0
        return look(*arguments, **named)

    return later


def test_waiting_for_verdicts_is_no_work_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward workers take all the time they are given, by a clock that only they move; the engines are done."""
    script, now = Scripted(tmp_path, {}), [0.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: now[0])

    def collect(timeout_seconds: float) -> list[tuple[str, Verdict]]:
        now[0] += timeout_seconds
        return []

    monkeypatch.setattr(script.rewards, "collect", collect)
    in_flight = script.in_flight()
    in_flight.ask(PROMPTS[:1], sampling_of(script.config))
    while in_flight.num_unanswered([5]):
        in_flight.poll(1.0)
    assert script.clock.take_waited() == 0.0
    in_flight.poll(2.5)
    assert now == [2.5] and script.clock.take_waited() == 2.5


def test_a_death_keeps_the_name_of_its_phase(tmp_path: Path) -> None:
    script = Scripted(tmp_path, {})
    script.rollout.dies_at, script.rollout.error = 2, WorkerLost("engine 0 died in phase generate")
    with pytest.raises(WorkerLost, match="engine 0 died"):
        script.collector.round(PROMPTS, sampling_of(script.config))
    assert script.clock.current == "generate"
