"""Phases generate and reward in one go: a round of prompts becomes scored groups while the caller waits.

| thread of work | consumes | produces | waits for |
|---|---|---|---|
| generate | prompts of the stream | finished responses | the engines' poll |
| reward | each response as it finishes | verdicts | the reward pool's collect |

A round's requests are all handed in before the first is polled and refills come in whole rounds, ordered by prompt index, so
that the outcome does not depend on which response finishes first.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from mrl.config.root import Config
from mrl.errors import MrlError, RewardError, RolloutError
from mrl.loops.in_flight import InFlight
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample, Status, VerdictKind

AT_ONCE = 4096
"""Samples in the making where prompts are asked in turn: more than engines make side by side."""


class Collector:
    """Waits for one round of prompts at a time; other groups may be in the making meanwhile."""

    def __init__(self, in_flight: InFlight, *, clock: PhaseClock, deadline_seconds: float) -> None:
        """`deadline_seconds`: the longest wait for all responses of a round, and then for all verdicts; in turn, from one to the next."""
        self._in_flight = in_flight
        self.clock, self._deadline_seconds = clock, deadline_seconds
        self._round_seconds = 0.0
        """What the last round of training prompts took to its last response."""

    def round(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """All prompts' groups with verdicts, in the prompts' order. Every sample is in its group, those without a reward too."""
        indices = [prompt.index for prompt in prompts]
        trains, start = max(indices, default=-1) >= 0, time.monotonic()
        with self.clock.phase("generate"):
            self._in_flight.let_calls_last(self._round_seconds if trains else 0.0, max(indices, default=-1))
            self._in_flight.ask(prompts, sampling)
            self._await_responses(indices)
        if trains:
            self._round_seconds = time.monotonic() - start
        with self.clock.phase("reward"):
            self._await_verdicts(indices)
        return [self._in_flight.take(index) for index in indices]

    def in_turn(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Group]:
        """The groups that `round` would give, each as soon as it and those before it are whole. Any number of prompts: they are read when
        there is room among AT_ONCE samples in the making."""
        waiting, asked = iter(prompts), deque[int]()
        while True:
            room = (AT_ONCE - self._in_flight.num_unjudged(asked)) // sampling.num_samples
            if more := list(itertools.islice(waiting, max(room, 0 if asked else 1))):
                self._in_flight.ask(more, sampling)
                asked += (prompt.index for prompt in more)
            if not asked:
                return
            self._await_any(asked)
            self._in_flight.flush_groups(self._in_flight.take_answered())
            while asked and not self._in_flight.num_unjudged([asked[0]]):
                yield self._in_flight.take(asked.popleft())

    def _await_responses(self, indices: Sequence[int]) -> None:
        self._wait(indices, lambda: self._in_flight.num_unanswered(indices) > 0, self._in_flight.poll)

    def _await_verdicts(self, indices: Sequence[int]) -> None:
        self._in_flight.flush_groups(indices)
        self._wait(indices, lambda: self._in_flight.num_unjudged(indices) > 0, self._in_flight.collect)

    def _await_any(self, indices: Sequence[int]) -> None:
        """Until a response or a verdict has come."""
        before = self._in_flight.num_come
        self._wait(indices, lambda: self._in_flight.num_come == before, self._in_flight.poll)

    def _wait(self, indices: Sequence[int], waits: Callable[[], bool], look: Callable[[float], None]) -> None:
        """Looks as long as it waits; past the deadline an error says what of these prompts is missing."""
        deadline = time.monotonic() + self._deadline_seconds
        while waits():
            look(1.0)
            if time.monotonic() > deadline and waits():
                raise self._late(indices)

    def _late(self, indices: Sequence[int]) -> MrlError:
        responses, verdicts = self._in_flight.missing(indices)
        error, what, phase = (
            (RolloutError, "responses", "generate") if responses else (RewardError, "verdicts", "reward")
        )
        missing = responses or verdicts
        return error(
            f"{len(missing)} {what} of {len(indices)} prompts (first: {missing[:3]}) did not arrive within "
            f"loop.phase_deadline_seconds = {self._deadline_seconds:g} s in phase {phase}"
        )


def sampling_of(config: Config) -> Sampling:
    """How the samples of a training round are drawn."""
    return Sampling(
        num_samples=config.loop.samples_per_prompt,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.run.seed,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
    )


def trainable(groups: Sequence[Group]) -> list[Group]:
    """The groups with only the samples that have a verdict and a response; groups left empty are gone."""
    kept = [Group(g.prompt, tuple(s for s in g.samples if has_reward(s))) for g in groups]
    return [group for group in kept if group.samples]


def has_reward(sample: Sample) -> bool:
    """Whether the sample may enter statistics and loss."""
    verdict = sample.verdict
    scored = verdict is not None and verdict.kind is not VerdictKind.NO_REWARD
    return scored and sample.status in (Status.FINISHED, Status.TRUNCATED) and len(sample.response_tokens) > 0
