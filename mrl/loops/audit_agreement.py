"""Agreement of rewards with audit verifiers, which have weight 0 and check a share of the samples. A policy
learns to please a judge: a failing judge shows here while the reward still rises."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.trials.agreement import wilson
from mrl.samples import Group, Sample

STEPS = 8
"""Number of newest steps taken together, and of first steps that they are compared with."""
RIGHT_ABOVE = 0.5
"""A reward, or an audit verifier's value, above this means that a response is correct."""

Seen = tuple[bool, bool]
"""(the reward says correct, the audit verifier says correct)."""


class AuditAgreement:
    """Audited samples of the first and of the newest steps."""

    def __init__(self, section: RewardSection) -> None:
        self._section = section
        self._has_any = any(part.is_audit for part in section.all_verifiers())
        self._first: list[list[Seen]] = []
        self._newest: collections.deque[list[Seen]] = collections.deque(maxlen=STEPS)

    def look(self, groups: Sequence[Group]) -> tuple[dict[str, float], str]:
        """Return metrics after one more step, and a warning if agreement fell; both empty without audits."""
        if not self._has_any:
            return {}, ""
        seen = [pair for g in groups for s in g.samples if s.has_reward for pair in self._seen(s)]
        if not seen:
            return {}, ""
        self._newest.append(seen)
        if len(self._first) < STEPS:
            self._first.append(seen)
        newest, first = ([pair for step in steps for pair in step] for steps in (self._newest, self._first))
        warning = self._fallen(_agreed(newest), len(newest), _agreed(first), len(first))
        wrong = [says for says, right in newest if not right]
        metrics = {
            "reward/agreement": _agreed(seen) / len(seen),
            "reward/audited": float(len(seen)),
            "reward/agreement_fell": float(bool(warning)),
        }
        return metrics | ({"reward/false_positive_frac": sum(wrong) / len(wrong)} if wrong else {}), warning

    def _seen(self, sample: Sample) -> Iterator[Seen]:
        """Yield one pair per audit verifier that checked the sample."""
        verdict = sample.verdict
        if verdict is None or verdict.value is None:
            return
        for part in self._section.for_domain(sample.domain).verifiers():
            if part.is_audit and part.label in verdict.parts:
                yield verdict.value > RIGHT_ABOVE, verdict.parts[part.label] > RIGHT_ABOVE

    def _fallen(self, agreed: int, total: int, agreed_first: int, total_first: int) -> str:
        """Return a warning if agreement fell by more than chance: 95 % intervals that do not overlap."""
        (_, high), (low_first, _) = wilson(agreed, total), wilson(agreed_first, total_first)
        share = (
            f"rewards agree with audit verifiers in {agreed} of {total} new samples ({agreed / total:.3f})"
        )
        return f"{share}, in {agreed_first / total_first:.3f} of the first" if high < low_first else ""


def _agreed(seen: Sequence[Seen]) -> int:
    return sum(says == right for says, right in seen)
