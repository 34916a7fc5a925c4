"""Rollout of many turns: the policy's from engines, an environment's observations between them.

An infrastructure failure, of an engine or an environment, restarts the trajectory, at most `rules.retries`
times; then it ends without a reward. A trajectory from a checkpoint replays its recorded turns in a fresh
environment, which must respond as before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrl.agents.answer import EnvironmentResult
from mrl.agents.environment_client import EnvironmentClient, OpenEnvironment
from mrl.agents.episode import EndedBy, Episode, Limits
from mrl.agents.render import Observation, TurnRenderer
from mrl.agents.tool_calls import BadCall, Format, ToolCall, parse_tool_calls
from mrl.rewards.thoughts import as_thought
from mrl.rollout.engine_pool import Policy
from mrl.rollout.request import Completion, GenerationRequest, require_same_context
from mrl.rollout.seeds import request_id, seed_of_request
from mrl.samples import Sample, Status, Turn
from mrl.trajectories.trajectory import ENGINE, ENVIRONMENT, IN_LINE, Trajectory


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Settings that the episodes of a domain share."""

    environment: str
    """Key of the environment (`AgentSection.environments`)."""
    renderer: TurnRenderer
    limits: Limits
    retries: int
    format: Format
    tools: Mapping[str, Mapping[str, Any]]
    """JSON schema of each tool's arguments, by the tool's name."""
    replayable: bool = True
    """True if the environment repeats its observations; if not, a resumed run restarts its episodes."""


class _OurFault(Exception):
    """Infrastructure failure, which says nothing about the policy."""

    def __init__(self, ended_by: EndedBy, reason: str) -> None:
        super().__init__(reason)
        self.ended_by, self.reason = ended_by, reason


class _NotRepeated(Exception):
    """The environment did not respond as recorded."""


async def environment_rollout(
    policy: Policy,
    environments: EnvironmentClient,
    rules: EpisodeRules,
    trajectory: Trajectory,
    request: GenerationRequest,
    run_seed: int,
) -> None:
    """Generate turns until environment, policy or a limit ends the episode. `asked`: a turn's request."""
    attempt = _attempts(trajectory.record)
    _begin_from_record(rules, trajectory)
    conversation = _Conversation(policy, rules, trajectory, request, run_seed, attempt)
    while True:
        trajectory.episode = Episode(trajectory.prompt.tokens, rules.limits)
        trajectory.waits_for = IN_LINE
        try:
            async with environments.opened(
                (trajectory.prompt.index, trajectory.number),
                f"{trajectory.name}/{trajectory.faults + trajectory.restarts}",
                rules.environment,
                dict(trajectory.prompt.metadata),
                # All samples of a prompt start from the same seed.
                seed_of_request(run_seed, request_id(trajectory.prompt.index, 0)) & 0x7FFFFFFF,
            ) as environment:
                trajectory.waits_for = ENVIRONMENT
                await conversation.run(environment)
            break
        except _NotRepeated:
            trajectory.record, trajectory.restarts = None, trajectory.restarts + 1
        except _OurFault as fault:
            if trajectory.faults >= rules.retries:
                trajectory.episode.end(fault.ended_by, fault.reason)
                break
            trajectory.faults += 1
    ended_by = trajectory.episode.ended_by
    assert ended_by is not None, "a conversation ends with its episode"
    trajectory.sample = trajectory.episode_sample(ended_by.status)


class _Conversation:
    """Turns of one trajectory, with one environment after another."""

    def __init__(
        self,
        policy: Policy,
        rules: EpisodeRules,
        trajectory: Trajectory,
        request: GenerationRequest,
        run_seed: int,
        attempt: int,
    ) -> None:
        self._policy, self._rules, self._trajectory, self._request = policy, rules, trajectory, request
        self._run_seed, self._attempt = run_seed, attempt

    @property
    def _episode(self) -> Episode:
        assert self._trajectory.episode is not None, "set before a conversation begins"
        return self._trajectory.episode

    async def run(self, environment: OpenEnvironment) -> None:
        """Run turns until the episode ends."""
        self._open(_without_our_fault(await environment.opening()))
        while self._episode.ended_by is None:
            turn = await self._next_turn()
            text = self._add(turn)
            if self._episode.ended_by is not None:
                break
            calls = parse_tool_calls(text, self._rules.format, self._rules.tools) if self._rules.tools else []
            if bad := [call for call in calls if isinstance(call, BadCall)]:
                self._refuse(bad)
            else:
                self._trajectory.waits_for = ENVIRONMENT
                answer = await environment.step(text, [c for c in calls if isinstance(c, ToolCall)])
                self._hear(_without_our_fault(answer), calls)
            self._require_repeats()

    def _open(self, answer: EnvironmentResult) -> None:
        """Begin the episode; the first observation, if any, becomes the prompt."""
        trajectory, rules = self._trajectory, self._rules
        if answer.messages:
            tokens = rules.renderer.opening(answer.messages)
            text = "\n".join(message["content"] for message in answer.messages)
            trajectory.episode = Episode(tokens, rules.limits, opening=text)
        if self._episode.budget < 1:
            self._episode.end(EndedBy.CONTEXT_LIMIT, "the prompt leaves no token for a turn")
        self._require_repeats()

    async def _next_turn(self) -> tuple[Completion, str]:
        """Return the next turn, recorded or new, with its text."""
        record, episode = self._trajectory.record, self._episode
        if record is not None and len(episode.turns) < len(turns := _turns(record)):
            turn = turns[len(episode.turns)]
            return _part(record, turn.start, turn.end, Status.FINISHED), turn.text
        completion = await self._generate(episode, record)
        return completion, completion.text

    async def _generate(self, episode: Episode, record: Sample | None) -> Completion:
        """Generate a turn, or continue the partial one of an earlier process."""
        self._trajectory.record, self._trajectory.waits_for = None, ENGINE
        start, so_far = episode.num_tokens, None
        if record is not None and len(record.response_tokens) > start:
            so_far = _part(record, start, len(record.response_tokens), Status.INTERRUPTED)
        request = dataclasses.replace(
            self._request,
            prompt_tokens=episode.context(),
            max_tokens=episode.budget,
            attempt=self._attempt,
            seed=seed_of_request(self._run_seed, self._request.request_id, self._attempt),
            urgent=True,
        )
        completion = await self._policy.generate(request, so_far)
        if completion.status in (Status.FAILED, Status.ABORTED) or not completion.segments:
            raise _OurFault(EndedBy.ENGINE_LOST, f"generation {completion.status.value}")
        require_same_context(request.prompt_tokens, completion)
        self._attempt = completion.segments[-1].attempt + 1
        return completion

    def _add(self, turn: tuple[Completion, str]) -> str:
        completion, text = turn
        if self._rules.renderer.opens_thought(self._episode.context()):
            text = as_thought(text)
        self._episode.add_turn(
            completion.tokens,
            completion.logprobs,
            completion.segments,
            text=text,
            is_cut=completion.status is Status.TRUNCATED,
            sampling_masks=completion.sampling_masks,
        )
        return text

    def _refuse(self, bad: Sequence[BadCall]) -> None:
        """Tell the policy which calls cannot be run."""
        self._episode.record_answer("\n".join(call.reason for call in bad))
        self._episode.bad_call()
        self._observe([Observation(call.reason, "tool", call.name, call.id) for call in bad])

    def _hear(self, answer: EnvironmentResult, calls: Sequence[ToolCall | BadCall]) -> None:
        observations = _observations(answer.messages, calls)
        text = "\n".join(observation.text for observation in observations)
        self._episode.record_answer(text, reward=answer.reward, seconds=answer.seconds)
        if answer.ended_by is not None:
            self._episode.end(answer.ended_by, answer.reason)
        self._observe(observations or [Observation("")])

    def _observe(self, observations: Sequence[Observation]) -> None:
        if self._episode.ended_by is None:
            self._episode.observe(self._rules.renderer.after(self._episode.last_token, observations))

    def _require_repeats(self) -> None:
        record = self._trajectory.record
        if record is not None and not _repeats(self._episode, record):
            raise _NotRepeated


def _without_our_fault(answer: EnvironmentResult) -> EnvironmentResult:
    if answer.ended_by is not None and answer.ended_by.is_infrastructure_failure:
        raise _OurFault(answer.ended_by, answer.reason)
    return answer


def _observations(
    messages: Sequence[Mapping[str, str]], calls: Sequence[ToolCall | BadCall]
) -> list[Observation]:
    """Return the environment's observations; if there is one per call, each gets its call's name and id."""
    observed: list[Any] = [Observation(m["content"], m["role"]) for m in messages]  # type: ignore[arg-type]
    if len(observed) != len(calls):
        return observed
    return [dataclasses.replace(o, name=c.name, id=c.id) for o, c in zip(observed, calls, strict=True)]


# -- what a checkpoint has of an episode ---------------------------------------------------------------------


def _begin_from_record(rules: EpisodeRules, trajectory: Trajectory) -> None:
    """Take over the counts of an earlier process; drop a record that cannot, or need not, be replayed."""
    if (record := trajectory.record) is None:
        return
    assert record.transcript is not None, "a partial episode has its transcript"
    trajectory.faults, trajectory.restarts = record.transcript.faults, record.transcript.restarts
    if not len(record.response_tokens):
        # no turn yet: the environment may open differently this time
        trajectory.record = None
    elif not rules.replayable and record.transcript.turns:
        trajectory.record, trajectory.restarts = None, trajectory.restarts + 1


def _attempts(record: Sample | None) -> int:
    """Return the number of requests made for a record."""
    return max((segment.attempt + 1 for segment in record.segments), default=0) if record else 0


def _turns(record: Sample) -> tuple[Turn, ...]:
    return record.transcript.turns if record.transcript is not None else ()


def _part(record: Sample, start: int, end: int, status: Status) -> Completion:
    """Return tokens `start` to `end` of the recorded response, as an engine returned them."""
    segments = tuple(
        dataclasses.replace(s, start=s.start - start, end=s.end - start)
        for s in record.segments
        if start <= s.start < end
    )
    tokens, logprobs = record.response_tokens[start:end], record.rollout_logprobs[start:end]
    masks = None if record.sampling_masks is None else record.sampling_masks.part(start, end)
    return Completion(record.sample_id, tokens, logprobs, segments, status, sampling_masks=masks)


def _repeats(episode: Episode, record: Sample) -> bool:
    """Return True if an episode matches its record after as many turns."""
    count = episode.num_tokens
    if not np.array_equal(episode.prompt_tokens, record.prompt_tokens):
        return False
    if (expected := _next_turn(record, len(episode.turns))) is None:
        return True  # the environment had not responded yet
    return count == expected and np.array_equal(episode.response(), record.response_tokens[:count])


def _next_turn(record: Sample, number: int) -> int | None:
    """Return the position of a turn's first token, begun or not; None if its prefix is not known."""
    turns = _turns(record)
    if number < len(turns):
        return turns[number].start
    end, length = turns[-1].end if turns else 0, len(record.response_tokens)
    if turns and length == end:
        return None
    trained = np.flatnonzero(record.loss_mask[end:])
    return end + int(trained[0]) if len(trained) else length
