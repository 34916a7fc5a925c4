"""One sample's way through its verifiers: which parts are still out, and the verdict they add up to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from mrl.rewards.contract import no_reward
from mrl.rewards.part import RewardPart
from mrl.samples import Verdict, VerdictKind


@dataclasses.dataclass(slots=True)
class Ticket:
    """A sample that is being scored."""

    sample_id: str
    parts: tuple[RewardPart, ...]
    num_tokens: int
    answers: dict[str, Verdict | None] = dataclasses.field(default_factory=dict)

    def answer(self, label: str, verdict: Verdict | None) -> Verdict | None:
        """Note one part's answer; the sample's verdict once all parts have answered."""
        self.answers[label] = verdict
        if len(self.answers) < len(self.parts):
            return None
        return combine(self.parts, self.answers)


def combine(parts: tuple[RewardPart, ...], answers: Mapping[str, Verdict | None]) -> Verdict:
    """The weighted sum of the parts' values.

    A part that does not apply (None) is left out; one part without a reward leaves the sample without one;
    the sample is rejected when every part that applies rejects it.
    """
    applying = [(part, verdict) for part in parts if (verdict := answers[part.label]) is not None]
    failed = next((verdict for _, verdict in applying if verdict.kind is VerdictKind.NO_REWARD), None)
    if failed is not None:
        return failed
    if not applying:
        return dataclasses.replace(no_reward("no verifier applies to this sample"), applies=False)
    if len(parts) == 1:
        return _weighted(*applying[0])
    kinds = {verdict.kind for _, verdict in applying}
    named: dict[str, float] = {}
    for part, verdict in applying:
        named[part.label] = float(verdict.value or 0.0)
        named |= {f"{part.label}.{name}": value for name, value in verdict.parts.items()}
    return Verdict(
        kind=VerdictKind.REJECTED if kinds == {VerdictKind.REJECTED} else VerdictKind.SCORED,
        value=sum(part.weight * float(verdict.value or 0.0) for part, verdict in applying),
        reason="; ".join(f"{part.label}: {verdict.reason}" for part, verdict in applying if verdict.reason)[
            :500
        ],
        parts=named,
        verifier="+".join(verdict.verifier or part.label for part, verdict in applying),
        version="+".join(verdict.version for _, verdict in applying),
        seconds=sum(verdict.seconds for _, verdict in applying),
        token_values=_summed_tokens(applying),
    )


def _weighted(part: RewardPart, verdict: Verdict) -> Verdict:
    if part.weight == 1.0:
        return verdict
    tokens = None if verdict.token_values is None else np.float32(part.weight) * verdict.token_values
    return dataclasses.replace(verdict, value=part.weight * float(verdict.value or 0.0), token_values=tokens)


def _summed_tokens(applying: list[tuple[RewardPart, Verdict]]) -> np.ndarray | None:
    weighted = [(part.weight, v.token_values) for part, v in applying if v.token_values is not None]
    if not weighted:
        return None
    return np.asarray(sum(np.float32(weight) * values for weight, values in weighted), dtype=np.float32)
