"""Samples that are episodes: the policy's turns from the engines and the answers of environments, one after the other.

| event | leads to |
|---|---|
| a sample is asked | its environment is opened, once fewer than agent.max_open are |
| an environment opened, or answered a turn | the next turn's request, on all tokens of the episode so far; or the end |
| a turn is whole | what the engine says it ran is compared with the episode's tokens; then a step of the environment, or the end |
| a fault of ours | the episode begins anew, at most agent.retries times; then it ends without a reward |

An episode that waits for its environment holds neither an engine nor the driver. One that a resumed run goes on with repeats
its turns as they were recorded before a fresh environment, which must say what it said.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mrl.agents.answer import EnvironmentAnswer
from mrl.agents.episode import EndedBy, Episode, EpisodeState, Limits
from mrl.agents.render import Observation, TurnRenderer
from mrl.agents.tool_calls import BadCall, Format, ToolCall, calls_in
from mrl.loops.protocols import Environments
from mrl.rewards.thoughts import as_thought
from mrl.rollout.drafts import require_ran
from mrl.rollout.request import GenerationRequest, Response, request_id, sample_of, seed_of_request
from mrl.samples import Prompt, Sample, Status, Transcript, Turn


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What the episodes of a domain share."""

    environment: str
    renderer: TurnRenderer
    limits: Limits
    retries: int
    format: Format
    tools: Mapping[str, Mapping[str, Any]]
    """The JSON schema of each tool's arguments, by its name."""
    replayable: bool = True
    """Whether the environment says the same again; without it a resumed run begins its episodes anew."""


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
    """An episode that has not ended."""

    prompt: Prompt
    rules: Rules
    asked: GenerationRequest
    """How its turns are drawn."""
    episode: Episode
    record: Sample | None
    """What it was when a run before ended, until it is that again."""
    attempt: int = 0
    """Of the next request."""
    faults: int = 0
    restarts: int = 0
    waits: bool = False
    """For an answer of its environment."""
    calls: Sequence[ToolCall | BadCall] = ()
    """Of its last turn."""
    key: str = ""
    """Of its environment, no two that it has have the same; empty until it is opened."""

    def sample(self, status: Status) -> Sample:
        """As it is now."""
        transcript = self.episode.transcript(faults=self.faults, restarts=self.restarts)
        number = sample_of(self.asked.request_id)[1]
        made = self.episode.sample(self.prompt, number, status=status, text=_text_of(transcript))
        return dataclasses.replace(made, transcript=transcript)


class Episodes:
    """The open episodes of a run. What events lead to is taken with `take_asked` and `take_ended`."""

    def __init__(
        self,
        environments: Environments,
        rules_of: Callable[[str], Rules | None],
        *,
        run_seed: int,
        max_open: int | None = None,
    ) -> None:
        """`rules_of` a domain; None where its samples are no episodes. `max_open`: environments at once, of training and
        of a validation each."""
        self.environments, self._rules_of = environments, rules_of
        self._run_seed, self._max_open = run_seed, max_open
        self._lines: dict[bool, list[tuple[tuple[int, int], str]]] = {True: [], False: []}
        """Heaps of the samples whose environment is still to be opened, (prompt, number) and name: of a validation, which is not to
        wait for episodes that rest meanwhile, and of training."""
        self._num_open = {True: 0, False: 0}
        self._open: dict[str, _Open] = {}
        self._by_key: dict[str, _Open] = {}
        self._asked: list[tuple[GenerationRequest, Response | None]] = []
        self._ended: list[Sample] = []

    def include(self, prompt: Prompt) -> bool:
        """Whether a prompt's samples are episodes."""
        return self._rules_of(prompt.domain) is not None

    # -- events --------------------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt, request: GenerationRequest, record: Sample | None = None) -> None:
        """Opens the environment of a sample, or puts it in line. `request` says how its turns are drawn; `record` is what
        `partial` gave of it."""
        rules = self._rules_of(prompt.domain)
        assert rules is not None, "only a prompt that is included"
        opened = _Open(prompt, rules, request, Episode(prompt.tokens, rules.limits), record)
        if record is not None:
            assert record.transcript is not None, "a partial episode has its transcript"
            opened.attempt = _attempts(record)
            opened.faults, opened.restarts = record.transcript.faults, record.transcript.restarts
            if not len(record.response_tokens):
                opened.record = (
                    None  # nothing was said: what its environment opens with need not be again what it was
                )
            elif not rules.replayable and record.transcript.turns:
                opened.record, opened.restarts = None, opened.restarts + 1
        self._open[request.request_id] = opened
        self._put_in_line(opened)
        self._open_next()

    def answered(self, answers: Iterable[EnvironmentAnswer]) -> None:
        """Takes answers of environments."""
        for answer in answers:
            if (opened := self._by_key.get(answer.key)) is not None:
                opened.waits = False
                self._answer(opened, answer)

    def turns(self, responses: Iterable[Response]) -> None:
        """Takes turns that are whole. RolloutError where an engine ran other tokens than the episode has."""
        for response in responses:
            opened = self._open[response.request_id]
            if response.status in (Status.FAILED, Status.ABORTED) or not response.segments:
                self._fault(opened, EndedBy.ENGINE_LOST, f"generation {response.status.value}")
                continue
            require_ran(opened.episode.context(), response)
            opened.attempt = response.segments[-1].attempt + 1
            self._turn(opened, response)

    def take_asked(self) -> list[tuple[GenerationRequest, Response | None]]:
        """The turns to ask for, each with what came of it before the run was resumed."""
        asked, self._asked = self._asked, []
        return asked

    def take_ended(self) -> list[Sample]:
        """The samples of the episodes that have ended."""
        ended, self._ended = self._ended, []
        return ended

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for their environment."""
        return sum(opened.waits for opened in self._open.values())

    def waits(self, name: str) -> bool:
        """Whether a sample waits for its environment."""
        return name in self._open and self._open[name].waits

    def told(self, name: str, engine: str) -> str:
        """A sample that is not whole, with its turn and what it waits for: its environment, or the engine; for people."""
        opened = self._open[name]
        if not opened.key:
            return f"{name} in line for an environment (agent.max_open = {self._max_open})"
        waits_for = "waiting for its environment" if opened.waits else engine
        return f"{name} at turn {len(opened.episode.turns)}, {waits_for}"

    def partial(self, name: str, so_far: Response | None) -> Sample:
        """An open episode as a PARKED sample; `so_far`: what came of the turn that was parked."""
        opened = self._open[name]
        if opened.record is not None:  # it is not yet again what it was
            return opened.record
        sample = opened.sample(Status.PARKED)
        return sample if so_far is None else _with_tail(sample, so_far)

    # -- an episode's way ----------------------------------------------------------------------------------------

    def _put_in_line(self, opened: _Open) -> None:
        opened.episode, opened.key = Episode(opened.prompt.tokens, opened.rules.limits), ""
        name = opened.asked.request_id
        heapq.heappush(self._lines[opened.prompt.index < 0], (sample_of(name), name))

    def _open_next(self) -> None:
        """Opens as many environments as may be open, for those that are first in line."""
        for validates, line in self._lines.items():
            while line and (self._max_open is None or self._num_open[validates] < self._max_open):
                self._begin(self._open[heapq.heappop(line)[1]])

    def _begin(self, opened: _Open) -> None:
        index, _ = sample_of(opened.asked.request_id)
        opened.waits = True
        opened.key = f"{opened.asked.request_id}/{opened.faults + opened.restarts}"
        self._by_key[opened.key] = opened
        self._num_open[opened.prompt.index < 0] += 1
        # All samples of a prompt begin alike.
        seed = seed_of_request(self._run_seed, request_id(index, 0)) & 0x7FFFFFFF
        task = dict(opened.prompt.metadata)
        self.environments.open(opened.key, opened.rules.environment, task, seed)

    def _answer(self, opened: _Open, answer: EnvironmentAnswer) -> None:
        if answer.ended_by is not None and answer.ended_by.is_ours:
            self._fault(opened, answer.ended_by, answer.reason)
        elif not answer.turn:
            self._opened(opened, answer)
        else:
            said = _observations(answer.messages, opened.calls)
            told = "\n".join(observation.text for observation in said)
            opened.episode.answered(told, reward=answer.reward, seconds=answer.seconds)
            if answer.ended_by is not None:
                opened.episode.end(answer.ended_by, answer.reason)
            self._observe(opened, said or [Observation("")])

    def _opened(self, opened: _Open, answer: EnvironmentAnswer) -> None:
        """The first observation, where there is one, is the prompt."""
        if answer.messages:
            tokens = opened.rules.renderer.opening(answer.messages)
            said = "\n".join(message["content"] for message in answer.messages)
            opened.episode = Episode(tokens, opened.rules.limits, opening=said)
        if opened.episode.budget < 1:
            opened.episode.end(EndedBy.CONTEXT_LIMIT, "the prompt leaves no token for a turn")
        self._go_on(opened)

    def _turn(self, opened: _Open, response: Response) -> None:
        episode, text, rules = opened.episode, response.text, opened.rules
        if rules.renderer.opens_thought(episode.context()):
            text = as_thought(text)
        cut = response.status is Status.TRUNCATED
        episode.add_turn(response.tokens, response.logprobs, response.segments, text=text, is_cut=cut)
        if episode.state is EpisodeState.ENDED:
            self._end(opened)
            return
        calls = calls_in(text, rules.format, rules.tools) if rules.tools else []
        opened.calls = calls
        if bad := [call for call in calls if isinstance(call, BadCall)]:
            episode.answered("\n".join(call.reason for call in bad))
            episode.bad_call()
            self._observe(opened, [Observation(call.reason, "tool", call.name, call.id) for call in bad])
        else:
            opened.waits = True
            self.environments.step(opened.key, text, [c for c in calls if isinstance(c, ToolCall)])

    def _observe(self, opened: _Open, said: Sequence[Observation]) -> None:
        episode = opened.episode
        if episode.state is not EpisodeState.ENDED:
            episode.observe(opened.rules.renderer.after(episode.last_token, said))
        self._go_on(opened)

    def _go_on(self, opened: _Open) -> None:
        """Repeats the next recorded turn, or asks for a new one, or ends the episode."""
        episode, record = opened.episode, opened.record
        if record is not None and not _repeats(episode, record):
            opened.record, opened.restarts = None, opened.restarts + 1
            self._begin_anew(opened)
        elif episode.state is EpisodeState.ENDED:
            self._end(opened)
        elif record is not None and len(episode.turns) < len(_turns(record)):
            turn = _turns(record)[len(episode.turns)]
            again = _part(record, turn.start, turn.end, Status.FINISHED)
            self._turn(opened, dataclasses.replace(again, text=turn.text))
        else:
            self._ask(opened)

    def _ask(self, opened: _Open) -> None:
        """The next turn, which a resumed run goes on with where it was."""
        record, opened.record = opened.record, None
        start, so_far = opened.episode.num_tokens, None
        if record is not None and len(record.response_tokens) > start:
            so_far = _part(record, start, len(record.response_tokens), Status.PARKED)
        request = dataclasses.replace(
            opened.asked,
            prompt_tokens=opened.episode.context(),
            max_tokens=opened.episode.budget,
            attempt=opened.attempt,
            seed=seed_of_request(self._run_seed, opened.asked.request_id, opened.attempt),
        )
        self._asked.append((request, so_far))

    def _fault(self, opened: _Open, by: EndedBy, reason: str) -> None:
        """Something of ours failed: the episode begins anew, or is given up."""
        if opened.faults >= opened.rules.retries:
            opened.episode.end(by, reason)
            self._end(opened)
        else:
            opened.faults += 1
            self._begin_anew(opened)

    def _begin_anew(self, opened: _Open) -> None:
        self._close(opened)
        self._put_in_line(opened)
        self._open_next()

    def _end(self, opened: _Open) -> None:
        ended_by = opened.episode.ended_by
        assert ended_by is not None, "only an episode that has ended is closed"
        self._close(opened)
        del self._open[opened.asked.request_id]
        self._ended.append(opened.sample(ended_by.status))
        self._open_next()

    def _close(self, opened: _Open) -> None:
        opened.waits = False
        del self._by_key[opened.key]
        self._num_open[opened.prompt.index < 0] -= 1
        self.environments.close(opened.key)


def _text_of(transcript: Transcript) -> str:
    """What was said, one after the other, as a judge reads it."""
    said = (part for turn in transcript.turns for part in (turn.text, turn.observation))
    return "\n".join(part for part in said if part)


def _observations(
    messages: Sequence[Mapping[str, str]], calls: Sequence[ToolCall | BadCall]
) -> list[Observation]:
    """What an environment says; with a message for each call, each has the name and the id of its call."""
    said: list[Any] = [Observation(m["content"], m["role"]) for m in messages]  # type: ignore[arg-type]
    if len(said) != len(calls):
        return said
    return [dataclasses.replace(o, name=c.name, id=c.id) for o, c in zip(said, calls, strict=True)]


# -- what a checkpoint has of an episode ---------------------------------------------------------------------------


def _turns(record: Sample) -> tuple[Turn, ...]:
    return record.transcript.turns if record.transcript is not None else ()


def _attempts(record: Sample) -> int:
    """Requests that were made for it."""
    return max((segment.attempt + 1 for segment in record.segments), default=0)


def _part(record: Sample, start: int, end: int, status: Status) -> Response:
    """The tokens `start` to `end` of its response, as an engine gave them."""
    segments = tuple(
        dataclasses.replace(s, start=s.start - start, end=s.end - start)
        for s in record.segments
        if start <= s.start < end
    )
    tokens, logprobs = record.response_tokens[start:end], record.rollout_logprobs[start:end]
    return Response(record.sample_id, tokens, logprobs, segments, status)


def _with_tail(sample: Sample, so_far: Response) -> Sample:
    """An episode's sample with a turn that was begun."""
    start, count = len(sample.response_tokens), len(so_far.tokens)
    moved = tuple(dataclasses.replace(s, start=s.start + start, end=s.end + start) for s in so_far.segments)
    return dataclasses.replace(
        sample,
        response_tokens=np.concatenate([sample.response_tokens, so_far.tokens]),
        loss_mask=np.concatenate([sample.loss_mask, np.ones(count, np.bool_)]),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs, so_far.logprobs]),
        policy_versions=np.concatenate([sample.policy_versions, so_far.policy_versions]),
        segments=sample.segments + moved,
    )


def _repeats(episode: Episode, record: Sample) -> bool:
    """Whether an episode stands where its record did after as many turns."""
    count = episode.num_tokens
    if not np.array_equal(episode.prompt_tokens, record.prompt_tokens):
        return False
    if (expected := _next_turn(record, len(episode.turns))) is None:
        return True  # its environment had not answered yet
    return count == expected and np.array_equal(episode.response(), record.response_tokens[:count])


def _next_turn(record: Sample, number: int) -> int | None:
    """The position of the first token of a turn, begun or not; None where what stands before it is not known."""
    turns = _turns(record)
    if number < len(turns):
        return turns[number].start
    end, length = turns[-1].end if turns else 0, len(record.response_tokens)
    if turns and length == end:
        return None
    own = np.flatnonzero(record.loss_mask[end:])
    return end + int(own[0]) if len(own) else length
