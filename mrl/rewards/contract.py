"""Contract of verifiers and reward kinds: requests, verdicts and stages, without pools and processes.

A verifier is an object with `name`, `version` and `async score(request) -> Verdict`. A group verifier has
`async score_group(requests) -> list[Verdict]` instead. One that mostly waits for a service is called
concurrently if it sets `waits = True`. An incorrect response is scored; a verifier that cannot score raises,
and the pool returns "no reward" after its retries, or at once for NoVerdict.
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
    """The verifier cannot score these samples, and a retry would not help."""


@dataclasses.dataclass(frozen=True, slots=True)
class RewardRequest:
    """One response to score."""

    sample_id: str
    group_id: int
    """Index of the prompt."""
    response: str
    ground_truth: Any
    """The row's answer, parsed at load by the domain's kind."""
    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt as messages, if the row has them."""
    domain: str = "default"
    tag: str = ""
    status: Status = Status.FINISHED
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    response_tokens: np.ndarray | None = None
    """[T] int32."""
    is_trial: bool = False
    """True if no policy generated the response, so that its tokens are not those of the text."""
    transcript: Transcript | None = None
    """Trajectory of an episode; `response` is then all its turns, concatenated."""
    policy_version: int = 0
    """Weight version that generated the last token."""
    deadline_seconds: float = 10.0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call, in half the time of a dataclass with slots: each sample goes to a worker."""
        return RewardRequest, _fields_of_request(self)

    @property
    def visible(self) -> str:
        """Response without its thoughts, including one that the prompt opened."""
        return visible_text(with_opened_thought(self.response, self.prompt))


_fields_of_request = operator.attrgetter(*(field.name for field in dataclasses.fields(RewardRequest)))


@runtime_checkable
class Verifier(Protocol):
    """Verifier of single samples."""

    name: str
    version: str

    async def score(self, request: RewardRequest) -> Verdict | None:
        """Return a verdict, or None if this verifier does not apply to the sample."""
        ...


@runtime_checkable
class GroupVerifier(Protocol):
    """Verifier of all samples of a prompt at once."""

    name: str
    version: str

    async def score_group(self, requests: Sequence[RewardRequest]) -> Sequence[Verdict | None]:
        """Return one verdict per request, in the same order."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One step of a kind's work, with its own queue and workers."""

    name: str = "whole"
    batch_size: int = 1
    """Samples per message. If above 1, the work is cheap and one worker does it all."""
    in_child: bool = False
    """Score each sample in a forked child, killed at the deadline; the worker never reads a response."""
    keeps_deadline: bool = False
    """The verifier ends overdue work itself and returns a verdict about it."""
    one_process: bool = False
    """Use one worker, which waits for others and counts its calls."""


class RewardKind:
    """Kind of reward (`reward.kind`): its stages, verifiers and ground truths.

    A subclass in one file and an entry in `mrl.rewards.kinds.registry` make a new kind. It must pickle.
    """

    stages: ClassVar[tuple[Stage, ...]] = (Stage(),)
    """Stages in order; None from one passes the sample to the next."""
    rules_section: ClassVar[type[Section]] = Section
    """The kind's own settings, under its name: `reward.maths` has the rules of `kind: maths`."""
    needs_ground_truth: ClassVar[bool] = False
    has_engine: ClassVar[bool] = False
    """True if it may use one of `reward.engines`."""
    scores_groups: ClassVar[bool] = False
    """True if it can score all samples of a prompt in one call."""

    def __init__(self, part: RewardPart, folder: str | None = None) -> None:
        """`folder`: the run's, for data that outlasts a worker; None without a run."""
        self.part, self.folder = part, folder

    @property
    def rules(self) -> Any:
        """The kind's own settings."""
        return getattr(self.part, str(self.part.kind))

    def worker_key(self) -> str:
        """Return all settings that its workers depend on; verifiers with equal keys share workers."""
        return self.part.model_dump_json(include={*OF_A_WORKER, str(self.part.kind)})

    @classmethod
    def faults(cls, part: RewardPart) -> Iterator[str]:
        """Yield one sentence per setting that the kind does not support."""
        if part.engine is not None and not cls.has_engine:
            yield f"engine is not for kind = {part.kind}, which uses no model"
        if part.group and not cls.scores_groups:
            yield f"group = true is not for kind = {part.kind}; plug-ins take whole groups"

    @property
    def is_binary(self) -> bool:
        """True if its rules allow only the values 0 (incorrect) and 1 (correct)."""
        return False

    def used_stages(self) -> tuple[Stage, ...]:
        """Return the stages that the settings need."""
        return self.stages

    def verifier(self, stage: Stage) -> Verifier | GroupVerifier:
        """Create a stage's verifier, in a reward worker; raise ConfigError or RewardError if that fails."""
        raise NotImplementedError

    def parse_ground_truth(self, raw: Any, *, place: str) -> Any:
        """Parse a row's answer at load into a ground truth; raise DataError naming `place`."""
        return raw

    def reading(self, request: RewardRequest) -> Mapping[str, str]:
        """Return what of a response is compared, and with what, by label; for people, without scoring."""
        return {"visible": request.visible}

    def right_response(self, ground_truth: Any) -> str | None:
        """Return a correct response in the required form; None if the ground truth does not give one."""
        return None

    def remark(self, ground_truth: Any) -> str:
        """Return a remark for users about a ground truth, or ""; rows are counted per remark, so share it."""
        return ""

    def announce(self) -> None:
        """Log on the driver, before a run, what this machine offers the kind."""


def request_for(
    sample: Sample, prompt: Prompt, *, ground_truth: Any, deadline_seconds: float
) -> RewardRequest:
    """Return the request to score a sample."""
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
    """Return a verdict with a value."""
    return Verdict(VerdictKind.SCORED, float(value), printable_reason(reason), parts)


def rejected(reason: str, *, min_reward: float = 0.0) -> Verdict:
    """Return the verdict of a sample outside what the verifier accepts."""
    return Verdict(VerdictKind.REJECTED, min_reward, printable_reason(reason))


def no_reward(reason: str) -> Verdict:
    """Return the verdict of a verifier that failed, without a value."""
    return Verdict(VerdictKind.NO_REWARD, None, printable_reason(reason))


def printable_reason(reason: str) -> str:
    """Escape control characters in a reason, which a policy may have written."""
    if reason.isprintable():
        return reason
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)


def checked_value(value: Any, *, verifier: str) -> float:
    """Return a reward as a finite float; raise RewardError for NaN, infinities and other types."""
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, bool | int | float):
        raise RewardError(
            f"verifier {verifier}: a reward must be a number, not {type(value).__name__} {str(value)[:60]!r}"
        )
    if isinstance(number, int) and abs(number) > sys.float_info.max:
        raise RewardError(f"verifier {verifier}: the reward is an integer that is too large for a float")
    if not math.isfinite(number):
        raise RewardError(f"verifier {verifier}: the reward is {number}; it must be finite")
    return float(number)
