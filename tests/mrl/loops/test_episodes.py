"""Episodes of a table policy and a small environment, under both schedules."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.episode import EndedBy
from mrl.agents.render import Observation
from mrl.errors import RolloutError
from mrl.loops.rollout_thread import RolloutThread
from mrl.observe.phases import PhaseClock
from mrl.rewards.visible import visible_text
from mrl.rollout.request import Completion, GenerationRequest, Sampling
from mrl.samples import Group, Prompt, Sample, Status
from mrl.trajectories.group import GroupInFlight
from mrl.trajectories.group_messages import decode_group, encode_group
from tests.mrl.loops.table_policy import TableEngines, TableRun, config_of, thread_over
from tests.support.runs import until
from tests.support.table_environment import (
    LIMITS,
    RULES,
    DigitRenderer,
    Returns,
    TableEnvironments,
    digits,
    table_episodes,
)

PROMPTS = [Prompt(n, np.array([n], np.int32), "", None, metadata={"row": n}) for n in range(4)]


def thread_of(
    config: Any, environments: TableEnvironments, engines: TableEngines | None = None, **rules: Any
) -> RolloutThread:
    engines = engines or served(config)
    engines.speaks = digits
    return thread_over(engines, Returns(), PhaseClock(), **table_episodes(environments, **rules))


def served(config: Any, kind: type[TableEngines] = TableEngines) -> TableEngines:
    engines = kind(config)
    engines.sync(0)
    return engines


def groups_of(
    thread: RolloutThread, config: Any, prompts: Sequence[Prompt] = PROMPTS, **sampling: Any
) -> list[Group]:
    thread.resume()
    return thread.groups(prompts, dataclasses.replace(Sampling.of(config), **sampling))


def test_a_turn_that_goes_on_in_a_thought_is_marked_as_one(tmp_path: Path) -> None:
    """A thought opened by the template hides tool calls from the parser and answers from rewards."""

    class Thinking(DigitRenderer):
        def opens_thought(self, tokens: np.ndarray) -> bool:
            return True

    config = config_of(tmp_path, {})
    thread = thread_of(config, TableEnvironments(), renderer=Thinking())
    samples = [sample for group in groups_of(thread, config) for sample in group.samples]
    turns = [turn for sample in samples if sample.transcript for turn in sample.transcript.turns]
    assert max(len(sample.transcript.turns) for sample in samples if sample.transcript) > 1
    assert all(turn.text.startswith("<think>") for turn in turns) and all(
        not visible_text(t.text) for t in turns
    )


def check_tokens(sample: Sample) -> None:
    """Check that turns and observations make up the response and each segment lies in one turn."""
    transcript, at = sample.transcript, 0
    assert transcript is not None and transcript.turns
    for number, turn in enumerate(transcript.turns, 1):
        assert turn.start == at and sample.loss_mask[turn.start : turn.end].all()
        assert turn.text == "".join(map(str, sample.response_tokens[turn.start : turn.end]))
        at = turn.end
        if number < len(transcript.turns):
            expected = [5, *map(int, turn.observation), 4]
            assert sample.response_tokens[at : at + len(expected)].tolist() == expected
            assert not sample.loss_mask[at : at + len(expected)].any()
            at += len(expected)
    assert at == len(sample.response_tokens)
    covered = np.concatenate([np.arange(s.start, s.end) for s in sample.segments])
    assert covered.tolist() == np.flatnonzero(sample.loss_mask).tolist()
    for segment in sample.segments:
        assert set(sample.policy_versions[segment.start : segment.end]) == {segment.version}
    assert [s.attempt for s in sample.segments] == sorted({s.attempt for s in sample.segments})


STREAM = ("loop.schedule=stream", "stream.max_staleness=2")


@pytest.mark.parametrize("words", [(), STREAM], ids=["on_policy", "stream"])
def test_a_run_of_episodes(tmp_path: Path, words: Sequence[str]) -> None:
    """Each token belongs to a turn or an observation; rewards stand on turns' last tokens."""
    config = config_of(tmp_path, {"estimator": {"name": "grpo"}}, "loop.steps=6", *words)
    environments = TableEnvironments(lateness=2)
    run = TableRun(config, acts=lambda: table_episodes(environments))
    run.engines.tokens_per_step, run.engines.at_once, run.engines.step_seconds = 1, 7, 0.001
    assert run.finished() == "done"
    samples = [s for groups in run.groups for group in groups for s in group.samples]
    assert len(samples) == 6 * 16
    for sample in samples:
        check_tokens(sample)
        assert sample.transcript is not None and sample.transcript.ended_by == "env_done"
        verdict, turns = sample.verdict, sample.transcript.turns
        assert verdict is not None and verdict.token_values is not None
        assert verdict.value == sum(turn.reward or 0.0 for turn in turns)
        assert np.flatnonzero(~np.isnan(verdict.token_values)).tolist() == [turn.end - 1 for turn in turns]
    turns = [len(s.transcript.turns) for s in samples if s.transcript]
    assert max(turns) == 4 and min(turns) == 1
    if words:
        assert any(len(s.segments) > len(s.transcript.turns) for s in samples if s.transcript), (
            "none was interrupted"
        )
        assert any(len(set(s.policy_versions[s.loss_mask])) > 1 for s in samples)
    row = run.rows()[-1]
    assert row["agent/ended_by/env_done"] == row["agent/episodes"] == 16 and row["agent/turns"] > 1
    assert row["agent/env_seconds_p99"] == 0.5 and row["agent/retries"] == 0
    left = set(environments.open_games)
    assert left.isdisjoint(f"{s.sample_id}/0" for s in samples) and (words or not left)
    begun = {(key.partition(".")[0], seed) for key, name, _, seed in environments.opened if name == "table"}
    assert len({index for index, _ in begun}) == len(begun) >= 24, (
        "a prompt's samples begin alike, prompts do not"
    )


def test_a_first_observation_is_the_prompt(tmp_path: Path) -> None:
    config = config_of(tmp_path, {})
    for group in groups_of(thread_of(config, TableEnvironments(opens_with="321")), config):
        for sample in group.samples:
            assert sample.prompt_tokens.tolist() == [3, 2, 1]
            assert sample.transcript is not None and sample.transcript.opening == "321"
            check_tokens(sample)


@pytest.mark.parametrize(
    ("limits", "ended_by", "status"),
    [
        ({"max_turns": 1}, "turn_limit", Status.TRUNCATED),
        ({"max_tokens": 5}, "context_limit", Status.TRUNCATED),
        ({"max_context": 6}, "context_limit", Status.TRUNCATED),
    ],
)
def test_limits(tmp_path: Path, limits: dict[str, int], ended_by: str, status: Status) -> None:
    rules: dict[str, Any] = {"limits": dataclasses.replace(LIMITS, **limits)}
    config = config_of(tmp_path, {})
    groups = groups_of(thread_of(config, TableEnvironments(), **rules), config)
    ends = {(s.transcript.ended_by, s.status) for g in groups for s in g.samples if s.transcript}
    assert (ended_by, status) in ends and ends <= {(ended_by, status), ("env_done", Status.FINISHED)}


def test_faults_of_ours_begin_anew_and_are_never_scored(tmp_path: Path) -> None:
    """One episode fails once, one always; the first is drawn again with new random streams."""
    faults = {
        f"{name}/{n}": EndedBy.ENV_CRASHED for name, count in (("0.0", 1), ("1.2", 3)) for n in range(count)
    }
    environments = TableEnvironments(faults=faults)
    config = config_of(tmp_path, {})
    groups = groups_of(thread_of(config, environments), config)
    samples = {s.sample_id: s for group in groups for s in group.samples}
    once, always = samples["0.0"], samples["1.2"]
    assert once.transcript is not None and once.transcript.faults == 1 and once.status is Status.FINISHED
    assert once.segments[0].attempt == 1 and once.verdict is not None and once.verdict.value is not None
    check_tokens(once)
    assert always.transcript is not None and always.transcript.ended_by == "env_crashed"
    assert always.transcript.faults == 2 and always.transcript.reason == "as the test says"
    assert always.status is Status.FAILED and always.verdict is not None and always.verdict.value is None
    others = [s for s in samples.values() if s not in (once, always)]
    assert all(s.transcript and s.transcript.faults == 0 and s.status is Status.FINISHED for s in others)
    assert not environments.open_games


def test_what_another_engine_ran_is_an_error(tmp_path: Path) -> None:
    """The second turn's engine sees one token fewer than the episode has."""

    class Forgetful(TableEngines):
        async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
            if request.attempt:
                request = dataclasses.replace(request, prompt_tokens=request.prompt_tokens[1:])
            return await super().generate(request, so_far)

    config = config_of(tmp_path, {})
    thread = thread_of(config, TableEnvironments(), served(config, Forgetful))
    with pytest.raises(RolloutError, match="ran other tokens before position 0 of the response"):
        groups_of(thread, config)


def test_calls_are_handed_over_and_bad_ones_are_told(tmp_path: Path) -> None:
    """A turn that begins with 0 makes an unreadable call, with 1 a good one; two bad turns end an episode."""
    words = {"0": '{"name": "ad', "1": '{"name": "add", "arguments": {"a": 1}, "id": "c1"}'}

    class Noting(DigitRenderer):
        observed = set[tuple[str, str, str]]()

        def after(self, last_token: int, observations: Sequence[Observation]) -> np.ndarray:
            self.observed |= {(o.role, o.name, o.id) for o in observations}
            return super().after(last_token, observations)

    config = config_of(tmp_path, {})
    environments, engines = TableEnvironments(), served(config)
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    renderer = Noting()
    thread = thread_of(config, environments, engines, tools={"add": schema}, renderer=renderer)
    engines.speaks = lambda tokens: words.get(digits(tokens[:1]), digits(tokens))
    samples = [s for group in groups_of(thread, config, num_samples=32) for s in group.samples]
    transcripts = [s.transcript for s in samples if s.transcript is not None]
    bad = [turn for t in transcripts for turn in t.turns if turn.text == words["0"]]
    assert bad and all("not valid JSON" in turn.observation and turn.reward is None for turn in bad)
    ended = [t for t in transcripts if t.ended_by == "bad_call"]
    assert ended and all(sum(turn.text == words["0"] for turn in t.turns) == 2 for t in ended)
    made = [call for turns in environments.calls.values() for calls in turns for call in calls]
    good = [turn for t in transcripts for turn in t.turns if turn.text == words["1"]]
    assert len(made) == len(good) > 0 and all(dict(call.arguments) == {"a": 1} for call in made)
    assert renderer.observed == {("tool", "add", "c1"), ("tool", "", ""), ("user", "", "")}


def halves(
    first: RolloutThread,
    second: RolloutThread,
    config: Any,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    steps: int,
    repeats: bool = True,
) -> tuple[list[Group], list[Group], list[Sample]]:
    """Return groups resumed after so many engine steps, those that a new process resumes, and its input."""
    sampling, engines = Sampling.of(config), first.engines
    assert isinstance(engines, TableEngines)
    engines.tokens_per_step, engines.at_once, engines.stops_after = 1, 5, steps

    def started(thread: RolloutThread, records: Sequence[Group]) -> list[GroupInFlight]:
        samples = [group.samples for group in records] or [()] * len(prompts)
        pairs = list(zip(prompts, samples, strict=True))
        return thread.ask(lambda: [thread._rollouts.start(p, sampling, before) for p, before in pairs])

    def saved(thread: RolloutThread, opened: Sequence[GroupInFlight]) -> list[Group]:
        thread.pause(snapshot=True)
        return thread.ask(lambda: [thread._rollouts.saved(group) for group in opened])

    first.resume()
    ours = started(first, [])
    until(lambda: engines.num_steps == steps, every=0.005)
    time.sleep(0.2)  # environments answer
    made = saved(first, ours)
    given = [decode_group(encode_group(group), prompts.__getitem__) for group in made]
    theirs = started(second, given)
    again = [encode_group(group) for group in saved(second, theirs)]
    assert not repeats or again == [encode_group(g) for g in given], "what was restored is saved alike"
    engines.stops_after = None
    for thread in (first, second):
        thread.resume()
    wholes = [
        [thread.do(_whole(group)) for group in opened] for thread, opened in ((first, ours), (second, theirs))
    ]
    return wholes[0], wholes[1], [s for group in made for s in group.samples]


async def _whole(group: GroupInFlight) -> Group:
    return await group.task


def test_episodes_of_a_checkpoint_go_on_from_their_bytes(tmp_path: Path) -> None:
    """Ended, within a turn, between turns, at the environment: each ends as in an uninterrupted run."""
    config = config_of(tmp_path, {})
    threads = thread_of(config, TableEnvironments()), thread_of(config, TableEnvironments(lateness=3))
    ours, theirs, given = halves(*threads, config, steps=12)
    interrupted = [s for s in given if s.status is Status.INTERRUPTED]
    assert any(s.transcript and s.transcript.turns for s in interrupted) and len(interrupted) < len(given)
    begun = [
        s
        for s in interrupted
        if s.transcript and s.segments and s.segments[-1].end > max([0, *(t.end for t in s.transcript.turns)])
    ]
    assert begun, "no turn was interrupted"
    assert [encode_group(group) for group in ours] == [encode_group(group) for group in theirs]
    for group in theirs:
        for sample in group.samples:
            check_tokens(sample)
            assert sample.transcript is not None and sample.transcript.restarts == 0


@pytest.mark.parametrize("why", ["it says something else", "it is not replayable"])
def test_an_episode_whose_environment_does_not_repeat_itself_begins_anew(tmp_path: Path, why: str) -> None:
    class Otherwise(TableEnvironments):
        def open(self, key: str, environment: str, task: Any, seed: int) -> None:
            super().open(key, environment, task, seed + (why == "it says something else"))

    rules = {} if why == "it says something else" else {"replayable": False}
    config = config_of(tmp_path, {})
    threads = thread_of(config, TableEnvironments()), thread_of(config, Otherwise(), **rules)
    _, theirs, given = halves(*threads, config, steps=12, repeats=False)
    interrupted = {
        s.sample_id: s
        for s in given
        if s.status is Status.INTERRUPTED and s.transcript and s.transcript.turns
    }
    restarted = [s for g in theirs for s in g.samples if s.transcript and s.transcript.restarts]
    assert restarted and {s.sample_id for s in restarted} <= set(interrupted)
    if rules:
        assert len(restarted) == len(interrupted)
    for sample in restarted:
        check_tokens(sample)
        before = [s.attempt for s in interrupted[sample.sample_id].segments]
        assert sample.segments[0].attempt > max(before), "no stream is drawn from twice"


def test_a_failed_generation_begins_anew(tmp_path: Path) -> None:
    class Failing(TableEngines):
        failed = False

        async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
            completion = await super().generate(request, so_far)
            if self.failed:
                return completion
            self.failed = True
            return Completion.empty(request.request_id, Status.FAILED)

    config = config_of(tmp_path, {})
    groups = groups_of(thread_of(config, TableEnvironments(), served(config, Failing)), config)
    samples = [s for group in groups for s in group.samples]
    assert sum(s.transcript.faults for s in samples if s.transcript) == 1
    assert all(s.status is Status.FINISHED for s in samples)


PLAIN = 2
"""The first prompts of a mixed run; the other prompts have single responses."""
MIXED = [dataclasses.replace(p, domain="game" if n < PLAIN else "plain") for n, p in enumerate(PROMPTS)]


def mixed_over(config: Any, environments: TableEnvironments) -> RolloutThread:
    engines = served(config)
    engines.speaks = digits
    rules: dict[str, Any] = {"environments": environments, "rules_of": {"game": RULES}.get}
    return thread_over(engines, Returns(), PhaseClock(), **rules)


def check_mixed(groups: Sequence[Group]) -> None:
    for group in groups:
        for sample in group.samples:
            if sample.domain == "game":
                check_tokens(sample)
            else:
                assert sample.transcript is None and sample.loss_mask.all() and len(sample.response_tokens)


def test_rows_without_an_environment_beside_others(tmp_path: Path) -> None:
    """Single responses equal those of a run without episodes, token for token."""
    config = config_of(tmp_path, {})
    groups = groups_of(mixed_over(config, environments := TableEnvironments(lateness=2)), config, MIXED)
    check_mixed(groups)
    assert {name.partition(".")[0] for name, *_ in environments.opened} == {"0", "1"}
    engines = served(config)
    engines.speaks = digits
    alone = groups_of(thread_over(engines, Returns(), PhaseClock()), config, MIXED[PLAIN:])
    assert [encode_group(group) for group in alone] == [encode_group(group) for group in groups[PLAIN:]]


def test_both_kinds_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, {})
    threads = [mixed_over(config, TableEnvironments(lateness=lateness)) for lateness in (1, 3)]
    ours, theirs, given = halves(threads[0], threads[1], config, MIXED, steps=4)
    assert {s.domain for s in given if s.status is Status.INTERRUPTED} == {"game", "plain"}
    check_mixed(theirs)
    assert [encode_group(group) for group in ours] == [encode_group(group) for group in theirs]


def test_no_more_environments_are_open_than_may_be(tmp_path: Path) -> None:
    """Waiting samples open in their prompts' order; retried ones open with the others of their prompt."""
    most: list[int] = []

    class Counted(TableEnvironments):
        def poll(self, timeout_seconds: float) -> list[Any]:
            most.append(len(self.open_games))
            return super().poll(timeout_seconds)

    config = config_of(tmp_path, {})
    environments = Counted(faults={"0.1/0": EndedBy.ENV_CRASHED})
    thread = thread_of(config, environments, max_environments=3)
    for group in groups_of(thread, config):
        for sample in group.samples:
            check_tokens(sample)
    assert max(most) == 3 and not environments.open_games
    names = [key.partition("/")[0] for key, *_ in environments.opened]
    begun = [int(name.partition(".")[0]) for name in names]
    assert len(names) == len(set(names)) + 1 and begun == sorted(begun)


def test_a_validation_does_not_wait_for_environments_of_interrupted_episodes(tmp_path: Path) -> None:
    """All open environments belong to interrupted groups, whose turns are generated later."""
    config = config_of(tmp_path, {})
    engines = served(config)
    engines.tokens_per_step, engines.stops_after = 1, 2
    thread = thread_of(config, TableEnvironments(), engines, max_environments=3)
    thread.resume()
    opened = thread.ask(
        lambda: thread._rollouts.start_all(PROMPTS, Sampling.of(config), on_failure=thread.fail)
    )
    while engines.num_steps < 2:
        time.sleep(0.005)
    assert "waiting for a free environment (agent.max_environments = 3)" in thread._rollouts.late(opened[3])
    thread.pause()
    engines.stops_after = None
    held_out = [dataclasses.replace(prompt, index=-1 - prompt.index) for prompt in PROMPTS[:2]]
    thread.resume(training=False)
    assert len(thread.groups(held_out, Sampling.of(config))) == 2
    assert all(group.num_incomplete for group in opened)
    thread.resume()
    for group in opened:
        thread.do(_whole(group))
