"""A round over scripted engines and reward workers: what is asked, in which order things come back, and who is blamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mrl.errors import RewardError, RolloutError, WorkerLost
from mrl.loops import collect
from mrl.loops.collect import sampling_of, trainable
from mrl.observe import phases
from mrl.samples import Prompt, Status, Verdict
from tests.mrl.loops.scripted import Scripted, ScriptedRollout
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


@pytest.mark.parametrize("silent", ["nobody", "rollout", "rewards"])
@pytest.mark.parametrize("of_silence", [False, True])
def test_a_round_of_any_length_may_have_a_deadline_from_one_answer_to_the_next(
    of_silence: bool, silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes a second of a clock that nothing else moves; twelve responses and verdicts come one a look."""
    script, now = Scripted(tmp_path, {}), [0.0]
    monkeypatch.setattr(collect.time, "monotonic", lambda: now[0])
    script.rollout = ScriptedRollout(at_once=1)
    for each, look in ((script.rollout, "ended"), (script.rewards, "collect")):
        monkeypatch.setattr(each, look, slow(getattr(each, look), now))
    script.rollout.silent, script.rewards.silent = silent == "rollout", silent == "rewards"
    collector = script.collector_of(deadline_seconds=5.0, of_silence=of_silence)
    if of_silence and silent == "nobody":
        assert len(collector.round(PROMPTS, sampling_of(script.config))) == 3 and now[0] > 5.0
        return
    with pytest.raises((RolloutError, RewardError), match="did not arrive within") as error:
        collector.round(PROMPTS, sampling_of(script.config))
    assert ("s of the last one in phase" in str(error.value)) == of_silence


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
