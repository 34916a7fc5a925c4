"""One sample's way through its verifiers: which parts are still out, and the verdict they add up to."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np

from mrl.rewards.contract import no_reward, rejected
from mrl.rewards.reward_part import RewardPart
from mrl.samples import Verdict, VerdictKind


@dataclasses.dataclass(slots=True)
class Ticket:
    """A sample that is being scored."""

    sample_id: str
    parts: tuple[RewardPart, ...]
    num_tokens: int
    answers: dict[str, Verdict | None] = dataclasses.field(default_factory=dict)
    waiting: tuple[RewardPart, ...] = ()
    """Behind gates that have not all answered."""

    def begin(self) -> tuple[RewardPart, ...]:
        """The parts that are asked at once; witnesses to other samples are answered for."""
        asked = tuple(part for part in self.parts if _looks_at(part, self.sample_id))
        self.answers |= {part.label: None for part in self.parts if part not in asked}
        gates = tuple(part for part in asked if part.gate is not None)
        self.waiting = tuple(part for part in asked if part.gate is None) if gates else ()
        return gates or asked

    def answer(self, label: str, verdict: Verdict | None) -> Verdict | None:
        """Note one part's answer; the sample's verdict once all parts have answered."""
        self.answers[label] = verdict
        if self._gates_have_answered() and (closed := closed_by(self.parts, self.answers)):
            self.answers |= {
                part.label: not_asked(part, closed) for part in self.parts if part.label not in self.answers
            }
            self.waiting = ()
        if len(self.answers) < len(self.parts):
            return None
        return weighted_verdict(self.parts, self.answers)

    def opened(self) -> tuple[RewardPart, ...]:
        """The parts to ask now that all gates have let the sample pass; each is told once."""
        if not self._gates_have_answered():
            return ()
        opened, self.waiting = self.waiting, ()
        return opened

    def _gates_have_answered(self) -> bool:
        return bool(self.waiting) and all(p.label in self.answers for p in self.parts if p.gate is not None)


def closed_by(parts: tuple[RewardPart, ...], answers: Mapping[str, Verdict | None]) -> str:
    """The gate that does not let a sample pass; empty while none says so. One that does not apply lets it pass."""
    for part in parts:
        verdict = answers.get(part.label)
        if (
            part.gate is not None
            and verdict is not None
            and (verdict.value is None or verdict.value < part.gate)
        ):
            return part.label
    return ""


def not_asked(part: RewardPart, gate: str) -> Verdict | None:
    """What a verifier behind a closed gate counts as."""
    return (
        None
        if part.is_witness
        else rejected(f"not asked: {gate} is a gate and closed", min_reward=part.min_reward)
    )


def _looks_at(part: RewardPart, sample_id: str) -> bool:
    """Whether a witness looks at the sample: the same each time it is asked for."""
    if part.share == 1.0:
        return True
    lot = int.from_bytes(hashlib.sha256(f"{part.label}\0{sample_id}".encode()).digest()[:8])
    return lot < part.share * 2**64


def weighted_verdict(parts: tuple[RewardPart, ...], answers: Mapping[str, Verdict | None]) -> Verdict:
    """The weighted sum of the parts' values.

    A part that does not apply (None) is left out; one part without a reward leaves the sample without one;
    the sample is rejected when every part that applies rejects it. A witness without an answer is left out, and
    decides neither.
    """
    answered = [(part, verdict) for part in parts if (verdict := answers[part.label]) is not None]
    applying = [(p, v) for p, v in answered if not (p.is_witness and v.kind is VerdictKind.NO_REWARD)]
    failed = next((verdict for _, verdict in applying if verdict.kind is VerdictKind.NO_REWARD), None)
    if failed is not None:
        return failed
    if all(part.is_witness for part, _ in applying) and len(parts) > 1:
        applying = []
    if not applying:
        return dataclasses.replace(
            no_reward("no verifier gives this sample a reward: each one returned None"), applies=False
        )
    if len(parts) == 1:
        return _weighted(*applying[0])
    kinds = {verdict.kind for part, verdict in applying if not part.is_witness}
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
    """[T] the weighted sum of the parts' values where any has one, NaN elsewhere."""
    weighted = [
        np.float32(part.weight) * v.token_values for part, v in applying if v.token_values is not None
    ]
    if not weighted:
        return None
    values = np.stack(weighted)
    return np.where(np.isnan(values).all(0), np.float32(np.nan), np.nansum(values, 0)).astype(np.float32)
