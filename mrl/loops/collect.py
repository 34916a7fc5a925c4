"""Phases generate and reward in one go: a round of prompts becomes scored groups while the caller waits.

| thread of work | consumes | produces | waits for |
|---|---|---|---|
| generate | prompts of the stream | finished responses | the engines' poll |
| reward | each response as it finishes | verdicts | the reward pool's collect |

A round's requests are all handed in before the first is polled and refills come in whole rounds, ordered by prompt index, so
that the outcome does not depend on which response finishes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mrl.config.root import Config
from mrl.errors import MrlError, RewardError, RolloutError
from mrl.loops.in_flight import InFlight
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample, Status, VerdictKind


class Collector:
    """Waits for one round of prompts at a time; other groups may be in the making meanwhile."""

    def __init__(
        self, in_flight: InFlight, *, clock: PhaseClock, deadline_seconds: float, of_silence: bool = False
    ) -> None:
        """`deadline_seconds`: the longest wait for all responses of a round, and then for all verdicts. `of_silence`: from one to the
        next, for rounds of any length."""
        self._in_flight = in_flight
        self.clock, self._deadline_seconds, self._of_silence = clock, deadline_seconds, of_silence
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

    def _await_responses(self, indices: Sequence[int]) -> None:
        self._wait(
            lambda: self._in_flight.num_unanswered(indices),
            self._in_flight.poll,
            lambda: self._late(RolloutError, "responses", self._in_flight.missing(indices)[0], indices),
        )

    def _await_verdicts(self, indices: Sequence[int]) -> None:
        self._in_flight.flush_groups(indices)
        self._wait(
            lambda: self._in_flight.num_unjudged(indices),
            self._in_flight.collect,
            lambda: self._late(RewardError, "verdicts", self._in_flight.missing(indices)[1], indices),
        )

    def _wait(
        self, num_left: Callable[[], int], look: Callable[[float], None], late: Callable[[], MrlError | None]
    ) -> None:
        """Looks until nothing is left; past the deadline raises what `late` says of it, if anything."""
        left, begun = num_left(), time.monotonic()
        while left:
            look(1.0)
            before, left = left, num_left()
            if self._of_silence and left < before:
                begun = time.monotonic()
            if time.monotonic() > begun + self._deadline_seconds and (error := late()):
                raise error

    def _late(
        self, error: type[MrlError], what: str, missing: Sequence[str], indices: Sequence[int]
    ) -> MrlError | None:
        if not missing:
            return None
        return error(
            f"{len(missing)} {what} of {len(indices)} prompts (first: {list(missing[:3])}) did not arrive within "
            f"loop.phase_deadline_seconds = {self._deadline_seconds:g} s{' of the last one' * self._of_silence} in phase {self.clock.current}"
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
