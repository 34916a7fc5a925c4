"""Phases generate, reward and filter: from prompts to scored groups.

| thread of work | consumes | produces | waits for |
|---|---|---|---|
| generate | prompts of the stream | finished responses | the engines' poll |
| reward | each response as it finishes | verdicts | the reward pool's collect |
| filter | whole scored groups | kept groups, surplus | nothing |

A round's requests are all handed in before the first is polled and refills come in whole rounds, ordered by prompt index, so
that the outcome does not depend on which response finishes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from mrl.config.root import Config
from mrl.errors import RewardError, RolloutError
from mrl.observe.phases import PhaseClock
from mrl.rollout.drafts import whole_sample
from mrl.rollout.request import Response, Round, Sampling, sample_of
from mrl.samples import (
    Group,
    Prompt,
    Sample,
    Status,
    Verdict,
    VerdictKind,
)

Decode = Callable[[list[np.ndarray]], list[str]]


class Rollout(Protocol):
    """The engines as the loop needs them."""

    def submit(self, requested: Round) -> None: ...

    def poll(self, timeout_seconds: float) -> list[Response]: ...


class RewardWorkers(Protocol):
    """The reward pool as the loop needs it."""

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None: ...

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]: ...

    def flush_groups(self) -> None: ...


class Collector:
    """Drives engines and verifiers for one round of prompts at a time."""

    def __init__(
        self,
        rollout: Rollout,
        reward_workers: RewardWorkers,
        decode: Decode,
        *,
        clock: PhaseClock,
        deadline_seconds: float,
    ) -> None:
        self._rollout, self._reward_workers, self._decode = rollout, reward_workers, decode
        self.clock, self._deadline_seconds = clock, deadline_seconds

    def round(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """All prompts' groups with verdicts, in the prompts' order. Every sample is in its group, those without a reward too."""
        requested = Round.of(prompts, sampling)
        verdicts: dict[str, Verdict] = {}
        with self.clock.phase("generate"):
            samples = self._generate(requested, {p.index: p for p in prompts}, verdicts)
        with self.clock.phase("reward"):
            self._await_verdicts(samples, verdicts)
        scored = [samples[k].with_verdict(verdicts[k]) for k in requested.request_ids()]
        size = sampling.num_samples
        return [Group(p, tuple(scored[i * size : (i + 1) * size])) for i, p in enumerate(prompts)]

    def _generate(
        self, requested: Round, prompts: Mapping[int, Prompt], verdicts: dict[str, Verdict]
    ) -> dict[str, Sample]:
        """Samples by id, handed to the verifiers as they come; `prompts` by index."""
        self._rollout.submit(requested)
        samples: dict[str, Sample] = {}
        deadline = time.monotonic() + self._deadline_seconds
        while len(samples) < len(requested):
            responses = self._rollout.poll(timeout_seconds=1.0)
            texts = self._decode([r.tokens for r in responses])
            arrived = []
            for response, text in zip(responses, texts, strict=True):
                index, number = sample_of(response.request_id)
                prompt = prompts[index]
                samples[response.request_id] = sample = whole_sample(prompt, number, response, text)
                arrived.append((sample, prompt))
            self._reward_workers.submit_all(arrived)
            verdicts.update(self._reward_workers.collect(0.0))
            if len(samples) < len(requested) and time.monotonic() > deadline:
                raise RolloutError(self._late("responses", requested.request_ids(), samples))
        return samples

    def _await_verdicts(self, samples: dict[str, Sample], verdicts: dict[str, Verdict]) -> None:
        self._reward_workers.flush_groups()
        deadline = time.monotonic() + self._deadline_seconds
        while len(verdicts) < len(samples):
            with self.clock.waiting():
                verdicts.update(self._reward_workers.collect(1.0))
            if len(verdicts) < len(samples) and time.monotonic() > deadline:
                raise RewardError(self._late("verdicts", samples, verdicts))

    def _late(self, what: str, ids: Collection[str], arrived: Container[str]) -> str:
        missing = [each for each in ids if each not in arrived]
        return (
            f"{len(missing)} of {len(ids)} {what} (first: {missing[:3]}) did not arrive within "
            f"loop.phase_deadline_seconds = {self._deadline_seconds:g} s in phase {self.clock.current}"
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
