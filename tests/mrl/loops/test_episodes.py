"""Episodes over a table of a policy and an environment of a few lines, under both schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.episode import EndedBy
from mrl.agents.render import Observation
from mrl.errors import RolloutError
from mrl.loops.collect import sampling_of
from mrl.loops.episodes import Episodes
from mrl.loops.in_flight import InFlight
from mrl.observe.phases import PhaseClock
from mrl.pool.group_bytes import decode_group, encode_group
from mrl.rewards.visible import visible_text
from mrl.rollout.request import GenerationRequest, Response, Round
from mrl.samples import Group, Prompt, Sample, Status
from tests.mrl.loops.table_policy import TableEngines, TableRun, config_of
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


def in_flight_over(
    config: Any, environments: TableEnvironments, engines: TableEngines | None = None, **rules: Any
) -> tuple[InFlight, TableEngines]:
    if engines is None:
        engines = TableEngines(config)
        engines.sync(0)
    engines.speaks = digits
    episodes = table_episodes(environments, **rules)
    return InFlight(engines, Returns(), PhaseClock(), run_seed=0, episodes=episodes), engines


def finished(in_flight: InFlight, *, polls: int = 60) -> list[Group]:
    """All groups, whole."""
    for _ in range(polls):
        in_flight.poll(0.0)
    return [in_flight.take(prompt.index) for prompt in PROMPTS]


def test_a_turn_that_goes_on_in_a_thought_is_marked_as_one(tmp_path: Path) -> None:
    """Of its prompt, or of what the template writes after an observation: no call in it is one, and no reward reads an answer in it."""

    class Thinking(DigitRenderer):
        def opens_thought(self, tokens: np.ndarray) -> bool:
            return True

    config = config_of(tmp_path, {})
    in_flight, _ = in_flight_over(config, TableEnvironments(), renderer=Thinking())
    in_flight.ask(PROMPTS, sampling_of(config))
    samples = [sample for group in finished(in_flight) for sample in group.samples]
    turns = [turn for sample in samples if sample.transcript for turn in sample.transcript.turns]
    assert max(len(sample.transcript.turns) for sample in samples if sample.transcript) > 1
    assert all(turn.text.startswith("<think>") for turn in turns) and all(
        not visible_text(t.text) for t in turns
    )


def check_tokens(sample: Sample) -> None:
    """Turns and what was said between them make up the response, and each segment lies in one turn."""
    transcript, at = sample.transcript, 0
    assert transcript is not None and transcript.turns
    for number, turn in enumerate(transcript.turns, 1):
        assert turn.start == at and sample.loss_mask[turn.start : turn.end].all()
        assert turn.text == "".join(map(str, sample.response_tokens[turn.start : turn.end]))
        at = turn.end
        if number < len(transcript.turns):
            said = [5, *map(int, turn.observation), 4]
            assert sample.response_tokens[at : at + len(said)].tolist() == said
            assert not sample.loss_mask[at : at + len(said)].any()
            at += len(said)
    assert at == len(sample.response_tokens)
    covered = np.concatenate([np.arange(s.start, s.end) for s in sample.segments])
    assert covered.tolist() == np.flatnonzero(sample.loss_mask).tolist()
    for segment in sample.segments:
        assert set(sample.policy_versions[segment.start : segment.end]) == {segment.version}
    assert [s.attempt for s in sample.segments] == sorted({s.attempt for s in sample.segments})


STREAM = ("loop.schedule=stream", "stream.max_age=2")


@pytest.mark.parametrize("words", [(), STREAM], ids=["on_policy", "stream"])
def test_a_run_of_episodes(tmp_path: Path, words: Sequence[str]) -> None:
    """Every token of a step is a turn's or an answer's, rewards stand on the turns' last tokens, and what ended is counted."""
    config = config_of(tmp_path, {"estimator": {"name": "grpo"}}, "loop.steps=6", *words)
    environments = TableEnvironments(lateness=2)
    run = TableRun(config, episodes=lambda: table_episodes(environments))
    run.engines.tokens_per_poll, run.engines.at_once = 1, 7
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
            "none was parked"
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
    in_flight, _ = in_flight_over(config := config_of(tmp_path, {}), TableEnvironments(opens_with="321"))
    in_flight.ask(PROMPTS, sampling_of(config))
    for group in finished(in_flight):
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
    in_flight, _ = in_flight_over(config := config_of(tmp_path, {}), TableEnvironments(), **rules)
    in_flight.ask(PROMPTS, sampling_of(config))
    ends = {(s.transcript.ended_by, s.status) for g in finished(in_flight) for s in g.samples if s.transcript}
    assert (ended_by, status) in ends and ends <= {(ended_by, status), ("env_done", Status.FINISHED)}


def test_faults_of_ours_begin_anew_and_are_never_scored(tmp_path: Path) -> None:
    """One episode fails once, one always; the first is drawn again with streams of its own."""
    faults = {
        f"{name}/{n}": EndedBy.ENV_CRASHED for name, count in (("0.0", 1), ("1.2", 3)) for n in range(count)
    }
    environments = TableEnvironments(faults=faults)
    in_flight, _ = in_flight_over(config := config_of(tmp_path, {}), environments)
    in_flight.ask(PROMPTS, sampling_of(config))
    samples = {s.sample_id: s for group in finished(in_flight) for s in group.samples}
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
    """The second turn's engine saw one token fewer than the episode has."""

    class Forgetful(TableEngines):
        def submit(self, requested: Any) -> None:
            requests = [
                r for each in requested for r in (each.requests() if isinstance(each, Round) else [each])
            ]
            super().submit([self._shortened(r) if r.attempt else r for r in requests])

        def _shortened(self, request: GenerationRequest) -> GenerationRequest:
            return dataclasses.replace(request, prompt_tokens=request.prompt_tokens[1:])

    config = config_of(tmp_path, {})
    engines = Forgetful(config)
    engines.sync(0)
    in_flight, _ = in_flight_over(config, TableEnvironments(), engines)
    in_flight.ask(PROMPTS, sampling_of(config))
    with pytest.raises(RolloutError, match="ran other tokens before position 0 of the response"):
        finished(in_flight)


def test_calls_are_handed_over_and_bad_ones_are_told(tmp_path: Path) -> None:
    """A turn that begins with 0 makes no readable call, one that begins with 1 a good one; two bad turns end an episode."""
    words = {"0": '{"name": "ad', "1": '{"name": "add", "arguments": {"a": 1}, "id": "c1"}'}

    class Noting(DigitRenderer):
        said = set[tuple[str, str, str]]()

        def after(self, last_token: int, observations: Sequence[Observation]) -> np.ndarray:
            self.said |= {(each.role, each.name, each.id) for each in observations}
            return super().after(last_token, observations)

    config = config_of(tmp_path, {})
    environments, engines = TableEnvironments(), TableEngines(config)
    engines.sync(0)
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    renderer = Noting()
    in_flight, _ = in_flight_over(config, environments, engines, tools={"add": schema}, renderer=renderer)
    engines.speaks = lambda tokens: words.get(digits(tokens[:1]), digits(tokens))
    in_flight.ask(PROMPTS, dataclasses.replace(sampling_of(config), num_samples=32))
    samples = [s for group in finished(in_flight) for s in group.samples]
    transcripts = [s.transcript for s in samples if s.transcript is not None]
    bad = [turn for t in transcripts for turn in t.turns if turn.text == words["0"]]
    assert bad and all("no JSON" in turn.observation and turn.reward is None for turn in bad)
    ended = [t for t in transcripts if t.ended_by == "bad_call"]
    assert ended and all(sum(turn.text == words["0"] for turn in t.turns) == 2 for t in ended)
    made = [call for turns in environments.calls.values() for calls in turns for call in calls]
    good = [turn for t in transcripts for turn in t.turns if turn.text == words["1"]]
    assert len(made) == len(good) > 0 and all(dict(call.arguments) == {"a": 1} for call in made)
    assert renderer.said == {("tool", "add", "c1"), ("tool", "", ""), ("user", "", "")}


def halves(
    config: Any, first_rules: Callable[[], TableEnvironments], second: TableEnvironments, **rules: Any
) -> tuple[list[Group], list[Group], list[Sample]]:
    """Groups that go on where they were parked, those that a new process goes on with, and what it was given."""
    sampling = sampling_of(config)
    one, engines = in_flight_over(config, first_rules())
    engines.tokens_per_poll, engines.at_once = 1, 5
    one.ask(PROMPTS, sampling)
    for _ in range(12):
        one.poll(0.0)
    one.park()
    made = [one.partial(prompt.index) for prompt in PROMPTS]
    other, _ = in_flight_over(config, second, **rules)
    other.restore([decode_group(encode_group(group), PROMPTS.__getitem__) for group in made], sampling)
    again = [other.partial(prompt.index) for prompt in PROMPTS]
    assert [encode_group(g) for g in again] == [encode_group(g) for g in made] or rules, (
        "what was restored is saved alike"
    )
    one.go_on([], sampling)
    other.go_on([], sampling)
    return finished(one), finished(other), [s for group in made for s in group.samples]


def test_episodes_of_a_checkpoint_go_on_from_their_bytes(tmp_path: Path) -> None:
    """Ended, half a turn, between two turns and at the environment: each ends as where nothing was interrupted."""
    config = config_of(tmp_path, {})
    ours, theirs, given = halves(config, TableEnvironments, TableEnvironments(lateness=3))
    parked = [s for s in given if s.status is Status.PARKED]
    assert any(s.transcript and s.transcript.turns for s in parked) and len(parked) < len(given)
    begun = [
        s
        for s in parked
        if s.transcript and s.segments and s.segments[-1].end > max([0, *(t.end for t in s.transcript.turns)])
    ]
    assert begun, "no turn was parked"
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
    _, theirs, given = halves(config_of(tmp_path, {}), TableEnvironments, Otherwise(), **rules)
    parked = {
        s.sample_id: s for s in given if s.status is Status.PARKED and s.transcript and s.transcript.turns
    }
    restarted = [s for g in theirs for s in g.samples if s.transcript and s.transcript.restarts]
    assert restarted and {s.sample_id for s in restarted} <= set(parked)
    if rules:
        assert len(restarted) == len(parked)
    for sample in restarted:
        check_tokens(sample)
        before = [s.attempt for s in parked[sample.sample_id].segments]
        assert sample.segments[0].attempt > max(before), "no stream is drawn from twice"


def test_a_failed_generation_begins_anew(tmp_path: Path) -> None:
    class Failing(TableEngines):
        failed = 0

        def take(self, engines: Sequence[int]) -> list[Response]:
            responses = super().take(engines)
            if responses and not self.failed:
                self.failed += 1
                return [Response.empty(responses[0].request_id, Status.FAILED), *responses[1:]]
            return responses

    config = config_of(tmp_path, {})
    engines = Failing(config)
    engines.sync(0)
    in_flight, _ = in_flight_over(config, TableEnvironments(), engines)
    in_flight.ask(PROMPTS, sampling_of(config))
    samples = [s for group in finished(in_flight) for s in group.samples]
    assert sum(s.transcript.faults for s in samples if s.transcript) == 1
    assert all(s.status is Status.FINISHED for s in samples)


PLAIN = 2
"""The first prompts of a mixed run; the others' samples are single responses."""
MIXED = [dataclasses.replace(p, domain="game" if n < PLAIN else "plain") for n, p in enumerate(PROMPTS)]


def mixed_over(config: Any, environments: TableEnvironments, engines: TableEngines | None = None) -> InFlight:
    """Engines that speak digits, and episodes of the domain game alone."""
    if engines is None:
        engines = TableEngines(config)
        engines.sync(0)
    engines.speaks = digits
    episodes = Episodes(environments, {"game": RULES}.get, run_seed=0)
    return InFlight(engines, Returns(), PhaseClock(), run_seed=0, episodes=episodes)


def check_mixed(groups: Sequence[Group]) -> None:
    for group in groups:
        for sample in group.samples:
            if sample.domain == "game":
                check_tokens(sample)
            else:
                assert sample.transcript is None and sample.loss_mask.all() and len(sample.response_tokens)


def test_rows_without_an_environment_beside_others(tmp_path: Path) -> None:
    """Single responses are what they are in a run without episodes, token for token."""
    config = config_of(tmp_path, {})
    mixed = mixed_over(config, environments := TableEnvironments(lateness=2))
    mixed.ask(MIXED, sampling_of(config))
    groups = finished(mixed)
    check_mixed(groups)
    assert {name.partition(".")[0] for name, *_ in environments.opened} == {"0", "1"}
    engines = TableEngines(config)
    engines.sync(0)
    engines.speaks = digits
    alone = InFlight(engines, Returns(), PhaseClock(), run_seed=0)
    alone.ask(MIXED[PLAIN:], sampling_of(config))
    for _ in range(60):
        alone.poll(0.0)
    assert [encode_group(alone.take(p.index)) for p in MIXED[PLAIN:]] == [
        encode_group(g) for g in groups[PLAIN:]
    ]


def test_both_kinds_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, {})
    engines = TableEngines(config)
    engines.sync(0)
    engines.tokens_per_poll, engines.at_once = 1, 6
    one = mixed_over(config, TableEnvironments(), engines)
    one.ask(MIXED, sampling_of(config))
    for _ in range(4):
        one.poll(0.0)
    one.park()
    made = [one.partial(prompt.index) for prompt in MIXED]
    parked = [s for group in made for s in group.samples if s.status is Status.PARKED]
    assert {s.domain for s in parked} == {"game", "plain"}
    other = mixed_over(config, TableEnvironments(lateness=3))
    other.restore(
        [decode_group(encode_group(group), MIXED.__getitem__) for group in made], sampling_of(config)
    )
    one.go_on([], sampling_of(config))
    other.go_on([], sampling_of(config))
    ours, theirs = finished(one), finished(other)
    check_mixed(theirs)
    assert [encode_group(group) for group in ours] == [encode_group(group) for group in theirs]


def test_no_more_environments_are_open_than_may_be(tmp_path: Path) -> None:
    """Samples in line are opened in their prompts' order, those that begin anew with the others of their prompt."""
    most: list[int] = []

    class Counted(TableEnvironments):
        def poll(self, timeout_seconds: float) -> list[Any]:
            most.append(len(self.open_games))
            return super().poll(timeout_seconds)

    config = config_of(tmp_path, {})
    engines = TableEngines(config)
    engines.sync(0)
    engines.speaks = digits
    environments = Counted(faults={"0.1/0": EndedBy.ENV_CRASHED})
    episodes = table_episodes(environments, max_open=3)
    in_flight = InFlight(engines, Returns(), PhaseClock(), run_seed=0, episodes=episodes)
    in_flight.ask(PROMPTS, sampling_of(config))
    assert "in line for an environment (agent.max_open = 3)" in in_flight.late(3)
    for group in finished(in_flight, polls=400):
        for sample in group.samples:
            check_tokens(sample)
    assert max(most) == 3 and not environments.open_games
    names = [key.partition("/")[0] for key, *_ in environments.opened]
    begun = [int(name.partition(".")[0]) for name in names]
    assert len(names) == len(set(names)) + 1 and begun == sorted(begun)


def test_a_validation_does_not_wait_for_environments_of_episodes_that_rest(tmp_path: Path) -> None:
    """All that may be open are of parked groups, whose turns are asked after it."""
    config = config_of(tmp_path, {})
    engines = TableEngines(config)
    engines.sync(0)
    engines.speaks, engines.tokens_per_poll, engines.at_once = digits, 1, 3
    episodes = table_episodes(TableEnvironments(), max_open=3)
    in_flight = InFlight(engines, Returns(), PhaseClock(), run_seed=0, episodes=episodes)
    in_flight.ask(PROMPTS, sampling_of(config))
    for _ in range(2):
        in_flight.poll(0.0)
    in_flight.park()
    held_out = [dataclasses.replace(prompt, index=-1 - prompt.index) for prompt in PROMPTS[:2]]
    in_flight.ask(held_out, sampling_of(config))
    for _ in range(200):
        in_flight.poll(0.0)
    assert {-1, -2} <= set(in_flight.whole()), in_flight.late(-1)
    in_flight.go_on([], sampling_of(config))
    finished(in_flight, polls=400)
