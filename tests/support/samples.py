"""Builders of samples, groups and batches for all tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mrl.rollout.request import Completion, GenerationRequest, prompt_digest
from mrl.samples import Group, Prompt, ResponseSegment, Sample, Status, TrainBatch, Verdict, VerdictKind
from mrl.training.batch import pack


def make_sample(
    prompt: int = 0, index: int = 0, *, num_prompt: int = 1, length: int = 3, **fields: Any
) -> Sample:
    """Return a finished response of random tokens without a verdict; `fields` override the defaults."""
    rng = np.random.default_rng((prompt, index))
    sample = Sample(
        prompt_index=prompt,
        sample_index=index,
        prompt_tokens=rng.integers(0, 50, num_prompt).astype(np.int32),
        response_tokens=rng.integers(0, 50, length).astype(np.int32),
        loss_mask=np.ones(length, np.bool_),
        rollout_logprobs=-rng.random(length).astype(np.float32),
        policy_versions=np.zeros(length, np.int32),
        status=Status.FINISHED,
    )
    return dataclasses.replace(sample, **fields)


def make_completion(
    request: GenerationRequest,
    tokens: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    status: Status = Status.FINISHED,
    text: str = "",
) -> Completion:
    """Return an engine's completion of the request; log-probs default to -0.5."""
    digest = prompt_digest(request.engine_prompt())
    segment = ResponseSegment(0, len(tokens), version, request.attempt, 0, digest)
    return Completion(
        request.request_id,
        np.array(tokens, np.int32),
        np.array([-0.5] * len(tokens) if logprobs is None else logprobs, np.float32),
        (segment,) if len(tokens) else (),
        status,
        text,
    )


def verdict_of(value: float | None, **fields: Any) -> Verdict:
    """Return a verdict with this reward; None means no reward."""
    kind = VerdictKind.NO_REWARD if value is None else VerdictKind.SCORED
    return Verdict(kind=kind, value=value, **fields)


def make_groups(samples: Iterable[Sample]) -> list[Group]:
    """Group the samples by prompt, in order of first appearance."""
    by_prompt: dict[int, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_index, []).append(sample)
    return [
        Group(Prompt(index, members[0].prompt_tokens, "", None), tuple(members))
        for index, members in by_prompt.items()
    ]


def make_batch(lengths: list[tuple[int, int]], *, group_size: int = 2) -> TrainBatch:
    """Pack samples of (prompt, response) lengths; each `group_size` of them form a group."""
    samples = [
        make_sample(*divmod(number, group_size), num_prompt=num_prompt, length=length)
        for number, (num_prompt, length) in enumerate(lengths)
    ]
    return pack(make_groups(samples))
