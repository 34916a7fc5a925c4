"""Phases generate, judge and filter: from prompts to judged groups.

| thread of work | consumes | produces | waits for |
|---|---|---|---|
| generate | prompts of the stream | finished responses | the engines' poll |
| judge | each response as it finishes | verdicts | the judge pool's collect |
| filter | whole judged groups | kept groups, surplus | nothing |

A round's requests are all handed in before the first is polled and refills come in whole rounds, ordered by prompt index, so
that the outcome does not depend on which response finishes first.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from mrl.errors import RewardError, RolloutError
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Request, Response, sample_seed
from mrl.samples import Group, Prompt, Sample, Status, Verdict, VerdictKind

Decode = Callable[[list[np.ndarray]], list[str]]


class Rollout(Protocol):
    """The engines' door as the loop needs it."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def poll(self, timeout_seconds: float) -> list[Response]: ...


class Judges(Protocol):
    """The judge pool's door."""

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None: ...

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]: ...

    def flush_groups(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How the samples of a round are drawn."""

    num_samples: int
    temperature: float
    max_tokens: int
    seed: int
    greedy: bool = False


class Collector:
    """Drives engines and judges for one round of prompts at a time."""

    def __init__(
        self, rollout: Rollout, judges: Judges, decode: Decode, *, clock: PhaseClock, deadline_seconds: float
    ) -> None:
        self._rollout, self._judges, self._decode = rollout, judges, decode
        self.clock, self._deadline_seconds = clock, deadline_seconds

    def round(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """All prompts' groups with verdicts, in the prompts' order. Every sample is in its group, unjudged ones too."""
        requests = {r.request_id: (p, i, r) for p in prompts for i, r in enumerate(requests_for(p, sampling))}
        verdicts: dict[str, Verdict] = {}
        with self.clock.phase("generate"):
            samples = self._generate(requests, verdicts)
        with self.clock.phase("judge"):
            self._await_verdicts(samples, verdicts)
        judged = {k: dataclasses.replace(s, verdict=verdicts[s.sample_id]) for k, s in samples.items()}
        return [
            Group(p, tuple(judged[_request_id(p, i)] for i in range(sampling.num_samples))) for p in prompts
        ]

    def _generate(
        self, requests: dict[str, tuple[Prompt, int, Request]], verdicts: dict[str, Verdict]
    ) -> dict[str, Sample]:
        self._rollout.submit([request for _, _, request in requests.values()])
        samples: dict[str, Sample] = {}
        deadline = time.monotonic() + self._deadline_seconds
        while len(samples) < len(requests):
            responses = self._rollout.poll(timeout_seconds=1.0)
            texts = self._decode([r.tokens for r in responses])
            arrived = []
            for response, text in zip(responses, texts, strict=True):
                prompt, index, _ = requests[response.request_id]
                samples[response.request_id] = sample = _sample(prompt, index, response, text)
                arrived.append((sample, prompt))
            self._judges.submit_all(arrived)
            verdicts.update(self._judges.collect(0.0))
            if time.monotonic() > deadline:
                missing = [k for k in requests if k not in samples]
                raise RolloutError(
                    f"{len(missing)} of {len(requests)} responses (first: {missing[:3]}) were not finished within "
                    f"loop.phase_deadline_seconds = {self._deadline_seconds:g} s in phase generate"
                )
        return samples

    def _await_verdicts(self, samples: dict[str, Sample], verdicts: dict[str, Verdict]) -> None:
        self._judges.flush_groups()
        deadline = time.monotonic() + self._deadline_seconds
        while len(verdicts) < len(samples):
            with self.clock.waiting():
                found = self._judges.collect(1.0)
            verdicts.update(found)
            if time.monotonic() > deadline:
                missing = [s.sample_id for s in samples.values() if s.sample_id not in verdicts]
                raise RewardError(
                    f"{len(missing)} of {len(samples)} verdicts (first: {missing[:3]}) were not there within "
                    f"loop.phase_deadline_seconds = {self._deadline_seconds:g} s in phase judge"
                )


def trainable(groups: Sequence[Group]) -> list[Group]:
    """The groups with only the samples that have a verdict and a response; groups left empty are gone."""
    kept = [Group(g.prompt, tuple(s for s in g.samples if is_judged(s))) for g in groups]
    return [group for group in kept if group.samples]


def is_judged(sample: Sample) -> bool:
    """Whether the sample may enter statistics and loss."""
    verdict = sample.verdict
    judged = verdict is not None and verdict.kind is not VerdictKind.UNJUDGED
    return judged and sample.status in (Status.FINISHED, Status.TRUNCATED) and len(sample.response_tokens) > 0


def requests_for(prompt: Prompt, sampling: Sampling) -> list[Request]:
    """What the engines are asked for one prompt's group."""
    return [
        Request(
            request_id=_request_id(prompt, index),
            prompt_tokens=prompt.tokens,
            seed=sample_seed(sampling.seed, _seed_index(prompt), index),
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            greedy=sampling.greedy,
        )
        for index in range(sampling.num_samples)
    ]


def _request_id(prompt: Prompt, index: int) -> str:
    return f"{prompt.index}.{index}"


def _seed_index(prompt: Prompt) -> int:
    """Validation prompts have negative indices; their seeds lie above those of any training prompt."""
    return prompt.index if prompt.index >= 0 else (1 << 36) - prompt.index


def _sample(prompt: Prompt, index: int, response: Response, text: str) -> Sample:
    return Sample(
        prompt_index=prompt.index,
        sample_index=index,
        prompt_tokens=prompt.tokens,
        response_tokens=response.tokens,
        loss_mask=np.ones(len(response.tokens), dtype=np.bool_),
        sampler_logprobs=response.logprobs,
        policy_versions=response.policy_versions,
        status=response.status,
        response_text=text,
        domain=prompt.domain,
        tag=prompt.tag,
    )
