"""One response through every stage of its verifiers, each told apart: why an answer was refused.

The work is done where it always is, in reward workers; only what was read of the response is found here, by
text alone.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence

from mrl.errors import RewardError
from mrl.rewards.contract import RewardKind, RewardRequest, request_for
from mrl.rewards.kinds.ground_truth import ground_truth_of
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.dispatch import Dispatcher
from mrl.rewards.pool.queues import StageQueue
from mrl.rewards.pool.tickets import closed_by, not_asked, weighted_verdict
from mrl.rewards.pool.trial import trial_sample
from mrl.rewards.pool.work import Task
from mrl.rewards.reward_part import RewardPart
from mrl.samples import Prompt, Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class StageVerdict:
    """What one stage of one verifier said."""

    label: str
    """The verifier's name, with the stage where it has several."""
    reading: Mapping[str, str]
    """What it looked at and what that was compared with, by what it is."""
    verdict: Verdict | None
    """None where it left the response to the next stage, or does not apply."""


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What every stage said, and what it adds up to."""

    stages: tuple[StageVerdict, ...]
    verdict: Verdict


def explain(
    section: RewardSection, prompt: Prompt, response: str, *, deadline_seconds: float = 600.0
) -> Explanation:
    """Verify one response to a prompt with the verifiers of its domain. Raises RewardError for a stage that
    has not answered by the deadline."""
    parts = section.for_domain(prompt.domain).verifiers()
    dispatcher = Dispatcher()
    dispatcher.start()
    try:
        said: dict[str, list[StageVerdict]] = {}
        for part in sorted(parts, key=lambda part: part.gate is None):
            if closed := closed_by(parts, {label: stages[-1].verdict for label, stages in said.items()}):
                said[part.label] = [StageVerdict(part.label, {}, not_asked(part, closed))]
                continue
            request = _request(prompt, response, part, parts)
            said[part.label] = list(_stages(dispatcher, section, part, request, deadline_seconds))
    finally:
        dispatcher.stop()
    verdict = weighted_verdict(parts, {label: stages[-1].verdict for label, stages in said.items()})
    return Explanation(tuple(itertools.chain.from_iterable(said.values())), verdict)


def _request(prompt: Prompt, response: str, part: RewardPart, parts: Sequence[RewardPart]) -> RewardRequest:
    ground_truth = ground_truth_of(part, ground_truth=prompt.ground_truth, alone=len(parts) == 1)
    sample = trial_sample(prompt, response)
    return request_for(sample, prompt, ground_truth=ground_truth, deadline_seconds=part.deadline_seconds)


def _stages(
    dispatcher: Dispatcher,
    section: RewardSection,
    part: RewardPart,
    request: RewardRequest,
    deadline_seconds: float,
) -> Iterator[StageVerdict]:
    """Every stage up to the one that decides; each has a queue of its own that hands nothing on."""
    kind: RewardKind = reward_kind(part)
    for stage in kind.used_stages():
        stage_queue = StageQueue(kind, stage, section, collections.Counter())
        answers: queue.SimpleQueue[Verdict | None] = queue.SimpleQueue()
        dispatcher.put(stage_queue, Task((request,), lambda found, answers=answers: answers.put(found[0])))
        dispatcher.wake()
        try:
            verdict = answers.get(timeout=deadline_seconds)
        except queue.Empty:
            raise RewardError(
                f"verifier {stage_queue.label} gave no verdict in {deadline_seconds:g} s"
            ) from dispatcher.failure
        yield StageVerdict(stage_queue.label, kind.reading(request), verdict)
        if verdict is not None:
            return
