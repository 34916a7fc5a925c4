"""What a verifier is given, what it answers, and what a kind of reward declares. Pools, processes and
retries are elsewhere.

A verifier is an object with `name`, `version` and `async score(request) -> Verdict`. A group verifier has
`async score_group(requests) -> list[Verdict]` instead. One that spends its time waiting for others says so
(`waits = True`) and is called many times at once. A wrong answer is scored; a verifier that could not look
raises, and the pool makes "no reward" of it after its retries, or at once where it raises NoVerdict.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from mrl.errors import RewardError
from mrl.rewards.reward_part import OF_A_WORKER, RewardPart
from mrl.rewards.visible import visible_text, with_opened_thought
from mrl.samples import Prompt, Sample, Status, Transcript, Verdict, VerdictKind
from mrl.section import Section


class NoVerdict(RewardError):
    """The verifier has no verdict on these samples, and would have none at another attempt."""


@dataclasses.dataclass(frozen=True, slots=True)
class RewardRequest:
    """One response to look at."""

    sample_id: str
    group_id: int
    """Index of the prompt."""
    response: str
    ground_truth: Any
    """What the domain's ground truth parser made of the row's answer at load."""
    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt as messages, where the row had them."""
    domain: str = "default"
    tag: str = ""
    status: Status = Status.FINISHED
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    response_tokens: np.ndarray | None = None
    """[T] int32."""
    is_trial: bool = False
    """No policy gave the response, and its tokens are not those of the text: a verifier is tried, or asked by a person."""
    transcript: Transcript | None = None
    """The turns, where the response is an episode; `response` is then all of them, one after the other."""
    policy_version: int = 0
    """Version that produced the last token."""
    deadline_seconds: float = 10.0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call, in half the time of a dataclass with slots: each sample is sent to a reward worker."""
        return RewardRequest, _fields_of_request(self)

    @property
    def visible(self) -> str:
        """The response without its thoughts, also one that the prompt opened."""
        return visible_text(with_opened_thought(self.response, self.prompt))


_fields_of_request = operator.attrgetter(*(field.name for field in dataclasses.fields(RewardRequest)))


@runtime_checkable
class Verifier(Protocol):
    """Looks at single samples."""

    name: str
    version: str

    async def score(self, request: RewardRequest) -> Verdict | None:
        """A verdict; None means that this verifier does not apply to the sample."""
        ...


@runtime_checkable
class GroupVerifier(Protocol):
    """Looks at all samples of a prompt at once."""

    name: str
    version: str

    async def score_group(self, requests: Sequence[RewardRequest]) -> Sequence[Verdict | None]:
        """One verdict per request, in the same order."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One step of a kind's work, with a queue and workers of its own."""

    name: str = "whole"
    batch_size: int = 1
    """Samples in one message. Above 1 the work is cheap and one worker does it all."""
    in_child: bool = False
    """Each sample is scored in a forked child that is killed at the deadline; the worker itself never reads
    a response."""
    keeps_deadline: bool = False
    """The verifier ends overdue work itself: what a sample used up is a verdict of its own."""
    one_process: bool = False
    """One worker does it all: it waits for others, and keeps account of what it asked."""


class RewardKind:
    """What `reward.kind` names: the stages of its work, its verifiers and its ground truths.

    A subclass in one file and its entry in `mrl.rewards.kinds.registry` make a new kind. Instances travel to
    reward workers pickled.
    """

    stages: ClassVar[tuple[Stage, ...]] = (Stage(),)
    """A stage that answers None hands the sample to the next one."""
    rules_section: ClassVar[type[Section]] = Section
    """The kind's own settings, found under its name: `reward.maths` has the rules of `kind: maths`."""
    needs_ground_truth: ClassVar[bool] = False
    has_engine: ClassVar[bool] = False
    """Whether it may ask one of `reward.engines`."""
    scores_groups: ClassVar[bool] = False
    """Whether it can score all samples of a prompt in one call."""

    def __init__(self, part: RewardPart, folder: str | None = None) -> None:
        """`folder` is the run's, for what outlasts a worker; None where there is no run."""
        self.part, self.folder = part, folder

    @property
    def rules(self) -> Any:
        """Its own settings."""
        return getattr(self.part, str(self.part.kind))

    def worker_key(self) -> str:
        """Return all that its workers depend on: verifiers with the same key share a queue and its workers."""
        return self.part.model_dump_json(include={*OF_A_WORKER, str(self.part.kind)})

    @classmethod
    def faults(cls, part: RewardPart) -> Iterator[str]:
        """Yield a sentence, in words for the user, for settings that the kind cannot work with."""
        if part.engine is not None and not cls.has_engine:
            yield f"engine is not for kind = {part.kind}, which asks no model"
        if part.group and not cls.scores_groups:
            yield f"group = true is not for kind = {part.kind}; plug-ins take whole groups"

    @property
    def is_binary(self) -> bool:
        """Whether its rules leave no other values than 0 (incorrect) and 1 (correct)."""
        return False

    def used_stages(self) -> tuple[Stage, ...]:
        """The stages that the settings ask for."""
        return self.stages

    def verifier(self, stage: Stage) -> Verifier | GroupVerifier:
        """The verifier of a stage, made in a reward worker. Raises ConfigError or RewardError where it
        cannot be made."""
        raise NotImplementedError

    def parse_ground_truth(self, raw: Any, *, place: str) -> Any:
        """What the verifier compares with, made of a row's answer at load. Raises DataError naming the
        place."""
        return raw

    def reading(self, request: RewardRequest) -> Mapping[str, str]:
        """What of a response is looked at, and what that is compared with, by what it is: for people, found by
        text alone."""
        return {"visible": request.visible}

    def right_response(self, ground_truth: Any) -> str | None:
        """A response that is right, in the form that is asked for; None where the ground truth does not tell."""
        return None

    def remark(self, ground_truth: Any) -> str:
        """What a user should know of a parsed ground truth, in words that many rows may share: rows are
        counted by them at load. Empty where there is nothing to say."""
        return ""

    def announce(self) -> None:
        """Logs on the driver, before a run, what this machine offers the kind."""


def request_for(
    sample: Sample, prompt: Prompt, *, ground_truth: Any, deadline_seconds: float
) -> RewardRequest:
    """What a verifier sees of a sample."""
    versions = sample.policy_versions
    return RewardRequest(
        sample_id=sample.sample_id,
        group_id=sample.prompt_index,
        response=sample.response_text,
        ground_truth=ground_truth,
        prompt=prompt.text,
        messages=prompt.messages,
        domain=prompt.domain,
        tag=prompt.tag,
        status=sample.status,
        metadata=prompt.metadata,
        response_tokens=sample.response_tokens,
        is_trial=not sample.loss_mask.any(),
        transcript=sample.transcript,
        policy_version=int(versions[-1]) if len(versions) else 0,
        deadline_seconds=deadline_seconds,
    )


def scored(value: float, reason: str = "", **parts: float) -> Verdict:
    """The verifier looked and gave a value."""
    return Verdict(VerdictKind.SCORED, float(value), printable_reason(reason), parts)


def rejected(reason: str, *, min_reward: float = 0.0) -> Verdict:
    """The sample is outside what the verifier accepts."""
    return Verdict(VerdictKind.REJECTED, min_reward, printable_reason(reason))


def no_reward(reason: str) -> Verdict:
    """The verifier failed; no value."""
    return Verdict(VerdictKind.NO_REWARD, None, printable_reason(reason))


def printable_reason(reason: str) -> str:
    """A reason as logs may show it: control characters, which a policy may have written, are escaped."""
    if reason.isprintable():
        return reason
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)


def checked_value(value: Any, *, verifier: str) -> float:
    """A reward as a finite float. Raises RewardError for NaN, infinities and other types."""
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, bool | int | float):
        raise RewardError(
            f"verifier {verifier}: a reward is a number, not {type(value).__name__} {str(value)[:60]!r}"
        )
    if isinstance(number, int) and abs(number) > sys.float_info.max:
        raise RewardError(f"verifier {verifier}: the reward is an integer that is too large for a float")
    if not math.isfinite(number):
        raise RewardError(f"verifier {verifier}: the reward is {number}; only finite numbers are rewards")
    return float(number)
