"""Estimate what running ahead of training (loop.schedule: stream) gains over on_policy.

docs/running-ahead.md explains the formula and lists its errors against measured steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mrl.capacity.estimate import Estimate
from mrl.capacity.step_time import decode_step, most_concurrent, prefill_seconds

MAX_AGES: Sequence[int] = (1, 2)
"""Values of stream.max_age that are estimated."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunningAhead:
    """The estimate for one stream.max_age."""

    max_age: int
    step_seconds: float
    speed_up: float
    """Seconds of an on_policy step with the same slots over step_seconds."""


def running_ahead(estimate: Estimate) -> list[RunningAhead]:
    """Return one estimate per max_age; none with the section agent, whose environments' waits are not known here."""
    if estimate.config.agent is not None:
        return []
    seconds = estimate.seconds
    parts = {
        "train": seconds["log_probs"] + seconds["update"] + seconds["gradient_exchange"],
        "longest": seconds["generate"],
        "other": seconds["sync"] + seconds["offload"],
        "own_slots": bool(estimate.config.launch.engine_slots),
    }
    total, found = sum(seconds.values()), []
    for max_age in MAX_AGES:
        work = work_seconds(estimate, max_age)
        step = step_seconds(work=work, max_age=max_age, **parts)
        found.append(RunningAhead(max_age, step, total / step))
    return found


def step_seconds(
    *, train: float, longest: float, work: float, other: float, max_age: int, own_slots: bool
) -> float:
    """Return the mean seconds of a step that generates up to max_age steps ahead.

    What engines work for a step, they work in every step: beside training on slots of their own, before it on
    shared slots. The rest of the longest response, when few sequences are left, is spread over max_age + 1 steps.

    Args:
        train: seconds of training in a step.
        longest: seconds from a step's first request to the end of its longest response, under on_policy.
        work: seconds in which the engines generate a step's tokens with as many sequences at once as they may.
        other: seconds in which neither side works (weight sync, off-load).
        max_age: stream.max_age; with 0 it is a step of on_policy.
        own_slots: whether engines have slots of their own.

    >>> step_seconds(train=30, longest=90, work=20, other=0, max_age=1, own_slots=False)
    85.0
    >>> step_seconds(train=30, longest=90, work=20, other=0, max_age=1, own_slots=True)
    65.0
    """
    if max_age == 0:
        return train + longest + other
    both = max(train, work) if own_slots else train + work
    return both + max(0.0, longest - work) / (max_age + 1) + other


def work_seconds(estimate: Estimate, max_age: int) -> float:
    """Return the seconds in which an engine generates its share of a step, with the sequences of max_age + 1 steps at once
    or as many as it holds."""
    facts, hardware, work = estimate.facts, estimate.hardware, estimate.work
    rollout, engine, samples = estimate.config.rollout, estimate.engine, estimate.generation.samples
    concurrent = min((max_age + 1) * samples, most_concurrent(rollout, work, engine))
    decode_steps = samples * work.response_tokens / concurrent
    prefill = samples * prefill_seconds(facts, hardware, rollout, work.prompt_tokens)
    return decode_steps * decode_step(facts, hardware, work, rollout, engine, concurrent) + prefill
