"""Groups in the making: prompts that were asked, the responses that came, the verdicts on them.

| event | comes from | leads to |
|---|---|---|
| a prompt is asked | a schedule | requests to the engines, or environments to be opened |
| a response is whole | engines, in one or more segments (mrl/rollout/drafts.py) | a sample, to the reward workers, or an episode's turn |
| an environment answers | its process | the episode's next request, or a sample (mrl/loops/episodes.py) |
| a verdict | reward workers | a whole group, once all are there |

Nothing in here waits longer than it is told, so that a schedule may look after other things meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mrl.loops.episodes import Episodes
from mrl.loops.protocols import RewardWorkers, Rollout
from mrl.observe.phases import PhaseClock
from mrl.rollout.drafts import Drafts, response_of, whole_sample
from mrl.rollout.request import GenerationRequest, Lengths, Response, Round, Sampling, request_id, sample_of
from mrl.samples import Group, Prompt, Sample, Status, Verdict

CALL_SHARE, MOST_CALL_SECONDS = 0.05, 10.0
"""How long a call of an engine lasts at most: so much of a step's seconds, and so many."""


@dataclasses.dataclass(slots=True)
class _Making:
    """One group."""

    prompt: Prompt
    size: int
    samples: dict[str, Sample] = dataclasses.field(default_factory=dict)
    verdicts: dict[str, Verdict] = dataclasses.field(default_factory=dict)

    def ids(self) -> list[str]:
        return [request_id(self.prompt.index, number) for number in range(self.size)]


class InFlight:
    """All groups in the making over one set of engines and reward workers; prompts have different indices."""

    def __init__(
        self,
        rollout: Rollout,
        reward_workers: RewardWorkers,
        clock: PhaseClock,
        *,
        run_seed: int,
        lengths: Lengths | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        """`clock` counts what is waited here; `lengths`: of each response, instead of where the policy would end it. `episodes`:
        of the prompts that they include."""
        self._clock, self._lengths, self._episodes = clock, lengths, episodes
        self._rollout, self._reward_workers = rollout, reward_workers
        self._drafts = Drafts(run_seed)
        self._making: dict[int, _Making] = {}
        self._answered_groups: set[int] = set()
        """Groups that have all responses, until they are taken."""
        self._whole: set[int] = set()
        """Groups that have all verdicts."""
        self.num_come = 0
        """Responses and verdicts, from the start."""
        self._resting: set[int] = set()
        """Groups that were in the making at a park: no turn of theirs is asked before `go_on`."""
        self._put_off: list[tuple[GenerationRequest, Response | None]] = []
        """Such turns."""
        self.newest_version = -1
        """Of the tokens that came since whoever reads it set it to -1."""

    def let_calls_last(self, step_seconds: float, awaited: int) -> None:
        """Each call of an engine costs the driver the same, whatever it brings: a few in a step that takes so long are enough, as long as
        the last response to the prompts up to the index `awaited` ends one. Environments are not kept waiting."""
        seconds = min(MOST_CALL_SECONDS, CALL_SHARE * step_seconds) if self._episodes is None else 0.0
        self._rollout.be_patient(seconds, awaited)

    # -- to the engines ------------------------------------------------------------------------------------------

    def ask(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Hands in a request for each response to these prompts, all at once."""
        self._submit([], prompts, sampling)

    def park(self) -> list[Response]:
        """The engines stop; what came so far of each response that they had begun. The others wait where they are."""
        self._resting = set(self._making)
        self._answered(self._rollout.park())
        return self._drafts.parked()

    def go_on(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Asks for what is parked, goes on with what waits, and asks these prompts, all at once."""
        self._resting = set()
        self._rollout.go_on()
        turns = self._draft(self._turns_to_ask())
        self._submit([*self._drafts.resubmit(), *turns], prompts, sampling)

    def _submit(
        self, parked: Sequence[GenerationRequest], prompts: Sequence[Prompt], sampling: Sampling
    ) -> None:
        acting = [prompt for prompt in prompts if self._acts(prompt)]
        requested = self._remember([prompt for prompt in prompts if not self._acts(prompt)], sampling)
        self._drafts.ask_round(requested)
        self._rollout.submit([*parked, requested] if requested.prompts else parked)
        self._begin_episodes(self._remember(acting, sampling).requests(), {})

    def _acts(self, prompt: Prompt) -> bool:
        """Whether a prompt's samples are episodes."""
        return self._episodes is not None and self._episodes.include(prompt)

    def _is_episode(self, name: str) -> bool:
        return self._acts(self._making[sample_of(name)[0]].prompt)

    def _begin_episodes(self, requests: Iterable[GenerationRequest], before: Mapping[str, Sample]) -> None:
        """Those that were begun `before` go on from there."""
        for request in requests:
            assert self._episodes is not None, "only where samples are episodes"
            prompt = self._making[sample_of(request.request_id)[0]].prompt
            self._episodes.begin(prompt, request, before.get(request.request_id))

    def _remember(self, prompts: Sequence[Prompt], sampling: Sampling) -> Round:
        self._making |= {prompt.index: _Making(prompt, sampling.num_samples) for prompt in prompts}
        return Round.of(prompts, dataclasses.replace(sampling, lengths=self._lengths))

    @property
    def stranded(self) -> bool:
        """Whether requests are out and no engine works: until one is brought in nothing comes."""
        return self.num_out > 0 and not self._rollout.at_work()

    @property
    def num_out(self) -> int:
        """Requests that engines have."""
        return len(self._drafts) - self._drafts.num_parked

    def under_way(self) -> Sequence[Any]:
        """The engines' calls whose end is worth a poll."""
        return self._rollout.under_way()

    def num_context(self, response: Response) -> int:
        """Tokens that an engine computes before it goes on with a parked response."""
        return self._drafts.num_context(response.request_id)

    # -- what comes ----------------------------------------------------------------------------------------------

    def poll(self, timeout_seconds: float) -> None:
        """Takes the responses and verdicts that are there, or the first ones within the time."""
        asks_engines = self.num_out > 0
        if asks_engines:
            self._go_on_elsewhere(self._rollout.take(self._rollout.ended(timeout_seconds)))
        waits = self._ask_environments(0.0 if asks_engines else timeout_seconds)
        self.collect(0.0 if asks_engines or waits else timeout_seconds)

    def _go_on_elsewhere(self, responses: Sequence[Response]) -> None:
        """Takes responses, of which those that an engine gave up are asked again where engines serve."""
        self._answered(responses)
        given_up = [r.request_id for r in responses if r.status is Status.PARKED]
        if again := [name for name in given_up if sample_of(name)[0] not in self._resting]:
            self._rollout.submit(self._drafts.resubmit(again))

    def _ask_environments(self, timeout_seconds: float) -> bool:
        """Takes the answers of environments, and asks for the turns after them; whether there was any to wait for."""
        if self._episodes is None or not self._episodes.num_waiting:
            return False
        with self._clock.waiting() if timeout_seconds else contextlib.nullcontext():
            self._episodes.answered(self._episodes.environments.poll(timeout_seconds))
        self._go_on_with_episodes()
        return True

    def _go_on_with_episodes(self) -> None:
        """Asks for the turns that events led to, and hands on the samples that ended."""
        assert self._episodes is not None, "only where samples are episodes"
        if requests := self._draft(self._turns_to_ask()):
            self._rollout.submit(requests)
        self._arrived(self._episodes.take_ended())

    def _turns_to_ask(self) -> list[tuple[GenerationRequest, Response | None]]:
        """Of groups that do not rest; the others' are put off."""
        if self._episodes is None:
            return []
        turns = self._put_off + self._episodes.take_asked()
        self._put_off = [turn for turn in turns if sample_of(turn[0].request_id)[0] in self._resting]
        return [turn for turn in turns if sample_of(turn[0].request_id)[0] not in self._resting]

    def _draft(self, turns: Sequence[tuple[GenerationRequest, Response | None]]) -> list[GenerationRequest]:
        """Notes turns that are asked, with what came of them before; the requests to hand in."""
        self._drafts.ask(request for request, _ in turns)
        begun = [so_far for _, so_far in turns if so_far is not None]
        self._drafts.take(begun)
        fresh = [request for request, so_far in turns if so_far is None]
        return fresh + (self._drafts.resubmit() if begun else [])

    def collect(self, timeout_seconds: float) -> None:
        """Takes the verdicts that are there, or the first ones within the time."""
        with self._clock.waiting() if timeout_seconds else contextlib.nullcontext():
            verdicts = self._reward_workers.collect(timeout_seconds)
        for name, verdict in verdicts:
            self._judged(sample_of(name)[0], name, verdict)

    def _judged(self, index: int, name: str, verdict: Verdict) -> None:
        self.num_come += 1
        making = self._making[index]
        making.verdicts[name] = verdict
        if len(making.verdicts) == making.size:
            self._whole.add(index)

    def flush_groups(self, indices: Collection[int]) -> None:
        """No more samples of these groups will come."""
        self._reward_workers.flush_groups(indices)

    def _answered(self, responses: Sequence[Response]) -> None:
        self.num_come += len(responses)
        whole = self._drafts.take(responses)
        versions = [response.segments[-1].version for response in whole if response.segments]
        self.newest_version = max([self.newest_version, *versions])
        samples, turns = [], []
        for response in whole:
            index, number = sample_of(response.request_id)
            if self._acts(prompt := self._making[index].prompt):
                turns.append(response)
            else:
                samples.append(whole_sample(prompt, number, response))
        self._arrived(samples)
        if self._episodes is not None:
            self._episodes.turns(turns)
            self._go_on_with_episodes()

    def _arrived(self, samples: Sequence[Sample]) -> None:
        arrived = []
        for sample in samples:
            making = self._making[sample.prompt_index]
            making.samples[sample.sample_id] = sample
            arrived.append((sample, making.prompt))
        self._judge(arrived)

    def _judge(self, arrived: Sequence[tuple[Sample, Prompt]]) -> None:
        self._reward_workers.submit_all(arrived)
        for index in sorted({sample.prompt_index for sample, _ in arrived}):
            making = self._making[index]
            if len(making.samples) == making.size:
                self._answered_groups.add(index)
        if failed := {s.prompt_index for s, _ in arrived if s.status in (Status.FAILED, Status.ABORTED)}:
            self.flush_groups([i for i in failed if len(self._making[i].samples) == self._making[i].size])

    # -- what there is -------------------------------------------------------------------------------------------

    def __contains__(self, index: int) -> bool:
        return index in self._making

    def num_unanswered(self, indices: Iterable[int]) -> int:
        """Samples of these groups without a response."""
        return sum(self._making[i].size - len(self._making[i].samples) for i in indices)

    def num_unjudged(self, indices: Iterable[int]) -> int:
        """Samples of these groups without a verdict."""
        return sum(self._making[i].size - len(self._making[i].verdicts) for i in indices)

    def missing(self, indices: Iterable[int]) -> tuple[list[str], list[str]]:
        """(the samples of these groups without a response and where they are, ids of those without a verdict); for people."""
        groups = [self._making[index] for index in indices]
        unanswered = [name for making in groups for name in making.ids() if name not in making.samples]
        unjudged = [name for making in groups for name in making.ids() if name not in making.verdicts]
        return [self._told(name) for name in unanswered], unjudged

    def _told(self, name: str) -> str:
        """Where a sample without a response is."""
        put_off = any(request.request_id == name for request, _ in self._put_off)
        engine = "parked, in no engine" if put_off else f"on {self._rollout.where(sample_of(name)[0])}"
        if self._episodes is not None and self._is_episode(name):
            return self._episodes.told(name, engine)
        so_far = self._drafts.so_far(name)
        return f"{name} {engine}" + (f" after {len(so_far.tokens)} tokens" if so_far else "")

    def late(self, index: int) -> str:
        """What a group lacks, by its first samples; for people."""
        unanswered, unjudged = self.missing([index])
        return f"{len(unanswered)} responses missing{_first(unanswered)}, {len(unjudged)} verdicts missing{_first(unjudged)}"

    def waits_for_environments(self, index: int) -> bool:
        """Whether nothing but environments is to answer before a group's responses are whole."""
        making, episodes = self._making[index], self._episodes
        unanswered = [name for name in making.ids() if name not in making.samples]
        return episodes is not None and all(map(episodes.waits, unanswered))

    def take_answered(self) -> set[int]:
        """Indices of the groups whose last response came since the last call."""
        answered, self._answered_groups = self._answered_groups, set()
        return answered

    def whole(self) -> list[int]:
        """Indices of the groups that have all verdicts, smallest first."""
        return sorted(self._whole)

    def take(self, index: int) -> Group:
        """A whole group, with its verdicts; it is not in the making any more."""
        making = self._making.pop(index)
        self._answered_groups.discard(index)
        self._whole.discard(index)
        samples = (making.samples[name].with_verdict(making.verdicts[name]) for name in making.ids())
        return Group(making.prompt, tuple(samples))

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def partial(self, index: int) -> Group:
        """What came so far of a group while the engines are stopped: samples with the verdicts that are there, and those that are
        not whole as PARKED. A sample that was not begun is not there."""
        making, samples = self._making[index], []
        for number, name in enumerate(making.ids()):
            if name in making.samples:
                sample, verdict = making.samples[name], making.verdicts.get(name)
                samples.append(sample if verdict is None else sample.with_verdict(verdict))
            elif self._episodes is not None and self._is_episode(name):
                begun = {request.request_id: so_far for request, so_far in self._put_off}
                samples.append(self._episodes.partial(name, self._drafts.so_far(name) or begun.get(name)))
            elif so_far := self._drafts.so_far(name):
                samples.append(whole_sample(making.prompt, number, so_far))
        return Group(making.prompt, tuple(samples))

    def restore(self, groups: Sequence[Group], sampling: Sampling) -> None:
        """Goes on with groups that `partial` gave, of this process or of another: reward workers get what has no verdict, and
        everything else waits, parked, for `go_on`."""
        requested = self._remember([group.prompt for group in groups], sampling).requests()
        self._resting = set(self._making)
        before = {sample.sample_id: sample for group in groups for sample in group.samples}
        whole = [sample for sample in before.values() if sample.status is not Status.PARKED]
        for sample in whole:
            making = self._making[sample.prompt_index]
            making.samples[sample.sample_id] = sample
            if sample.verdict is not None:
                self._judged(sample.prompt_index, sample.sample_id, sample.verdict)
        self._go_on_from(before, [r for r in requested if not self._is_whole(r.request_id)])
        self._judge([(s, self._making[s.prompt_index].prompt) for s in whole if s.verdict is None])

    def _is_whole(self, name: str) -> bool:
        return name in self._making[sample_of(name)[0]].samples

    def _go_on_from(self, before: Mapping[str, Sample], requests: Sequence[GenerationRequest]) -> None:
        """What these requests are to become was so far in `before`."""
        acting = [request for request in requests if self._is_episode(request.request_id)]
        self._begin_episodes(acting, before)
        requests = [request for request in requests if not self._is_episode(request.request_id)]
        names = [request.request_id for request in requests]
        self._drafts.ask(requests)
        self._drafts.take(
            response_of(before[name]) if name in before else Response.empty(name, Status.PARKED)
            for name in names
        )


def _first(names: Sequence[str]) -> str:
    return f" (first: {'; '.join(names[:3])})" if names else ""
