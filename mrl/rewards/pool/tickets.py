"""State of one sample across its verifiers: missing parts and the total verdict."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np

from mrl.rewards.contract import no_reward, rejected
from mrl.rewards.reward_part import RewardPart
from mrl.samples import Verdict, VerdictKind


@dataclasses.dataclass(slots=True)
class SampleScore:
    """Sample that is being scored."""

    sample_id: str
    parts: tuple[RewardPart, ...]
    num_tokens: int
    answers: dict[str, Verdict | None] = dataclasses.field(default_factory=dict)
    waiting: tuple[RewardPart, ...] = ()
    """Parts that wait for open gates."""

    def begin(self) -> tuple[RewardPart, ...]:
        """Return the parts to run first; audit verifiers that do not look at this sample get None."""
        active = tuple(part for part in self.parts if _looks_at(part, self.sample_id))
        self.answers |= {part.label: None for part in self.parts if part not in active}
        gates = tuple(part for part in active if part.gate is not None)
        self.waiting = tuple(part for part in active if part.gate is None) if gates else ()
        return gates or active

    def record(self, label: str, verdict: Verdict | None) -> Verdict | None:
        """Record one part's verdict; return the sample's verdict once all parts have one, else None."""
        self.answers[label] = verdict
        if self._gates_have_answered() and (closed := closed_by(self.parts, self.answers)):
            self.answers |= {
                part.label: skipped_verdict(part, closed)
                for part in self.parts
                if part.label not in self.answers
            }
            self.waiting = ()
        if len(self.answers) < len(self.parts):
            return None
        return weighted_verdict(self.parts, self.answers)

    def opened(self) -> tuple[RewardPart, ...]:
        """Return the parts to run after all gates let the sample pass; each part is returned once."""
        if not self._gates_have_answered():
            return ()
        opened, self.waiting = self.waiting, ()
        return opened

    def _gates_have_answered(self) -> bool:
        return bool(self.waiting) and all(p.label in self.answers for p in self.parts if p.gate is not None)


def closed_by(parts: tuple[RewardPart, ...], answers: Mapping[str, Verdict | None]) -> str:
    """Return the label of the gate that rejects the sample, or ""; one that does not apply is open."""
    for part in parts:
        verdict = answers.get(part.label)
        if (
            part.gate is not None
            and verdict is not None
            and (verdict.value is None or verdict.value < part.gate)
        ):
            return part.label
    return ""


def skipped_verdict(part: RewardPart, gate: str) -> Verdict | None:
    """Return the verdict of a verifier that a closed gate skipped."""
    return (
        None
        if part.is_audit
        else rejected(f"not asked: {gate} is a gate and closed", min_reward=part.min_reward)
    )


def _looks_at(part: RewardPart, sample_id: str) -> bool:
    """Return True if an audit verifier looks at the sample; deterministic per sample id."""
    if part.share == 1.0:
        return True
    draw = int.from_bytes(hashlib.sha256(f"{part.label}\0{sample_id}".encode()).digest()[:8])
    return draw < part.share * 2**64


def weighted_verdict(parts: tuple[RewardPart, ...], answers: Mapping[str, Verdict | None]) -> Verdict:
    """Return the weighted sum of the parts' values.

    Parts that do not apply (None) are left out. If one part has no reward, the sample has none; if every part
    that applies rejects it, it is rejected. Audit verifiers decide neither; one without reward is left out.
    """
    answered = [(part, verdict) for part in parts if (verdict := answers[part.label]) is not None]
    applying = [(p, v) for p, v in answered if not (p.is_audit and v.kind is VerdictKind.NO_REWARD)]
    failed = next((verdict for _, verdict in applying if verdict.kind is VerdictKind.NO_REWARD), None)
    if failed is not None:
        return failed
    if all(part.is_audit for part, _ in applying) and len(parts) > 1:
        applying = []
    if not applying:
        return dataclasses.replace(
            no_reward("no verifier gives this sample a reward: each one returned None"), applies=False
        )
    if len(parts) == 1:
        return _weighted(*applying[0])
    kinds = {verdict.kind for part, verdict in applying if not part.is_audit}
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
    """Return [T]: the weighted sum of the parts' token values, NaN at tokens without any."""
    weighted = [
        np.float32(part.weight) * v.token_values for part, v in applying if v.token_values is not None
    ]
    if not weighted:
        return None
    values = np.stack(weighted)
    return np.where(np.isnan(values).all(0), np.float32(np.nan), np.nansum(values, 0)).astype(np.float32)
