"""Audit verifiers (weight 0): how often rewards agree with them, and when agreement falls."""

from __future__ import annotations

import random

import numpy as np

from mrl.loops.audit_agreement import STEPS, AuditAgreement
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.samples import Group, Prompt, Sample, Status, Verdict, VerdictKind

ONE = np.zeros(1, np.int32)


def section() -> RewardSection:
    parts = [{"kind": "llm", "path": "http://judge"}, {"kind": "maths", "weight": 0.0, "share": 0.5}]
    return RewardSection.model_validate({"parts": parts})


def sample(index: int, value: float, witness: float | None) -> Sample:
    parts = {"llm": value} | ({} if witness is None else {"maths": witness})
    verdict = Verdict(VerdictKind.SCORED, value, parts=parts)
    mask, logprobs = np.ones(1, bool), np.zeros(1, np.float32)
    return Sample(0, index, ONE, ONE, mask, logprobs, ONE, Status.FINISHED, verdict=verdict)


def step(rng: random.Random, *, wrong_taken: float, count: int = 64) -> list[Group]:
    """Half of the samples are correct; the judge also accepts a share of the incorrect ones."""
    rights = [number % 2 == 0 for number in range(count)]
    made = [
        sample(n, float(right or rng.random() < wrong_taken), float(right) if n % 4 < 2 else None)
        for n, right in enumerate(rights)
    ]
    return [Group(Prompt(0, ONE, "", "12"), tuple(made))]


def test_agreement_counts_what_a_witness_looked_at() -> None:
    samples = [sample(0, 1.0, 1.0), sample(1, 1.0, 0.0), sample(2, 0.0, 0.0), sample(3, 1.0, None)]
    metrics, message = AuditAgreement(section()).look([Group(Prompt(0, ONE, "", "12"), tuple(samples))])
    assert metrics == {
        "reward/agreement": 2 / 3,
        "reward/audited": 3.0,
        "reward/agreement_fell": 0.0,
        "reward/false_positive_frac": 0.5,
    }
    assert not message
    assert AuditAgreement(section()).look([Group(Prompt(0, ONE, "", "12"), (sample(0, 1.0, None),))]) == (
        {},
        "",
    )


def test_a_judge_that_is_being_deceived_is_noticed_and_an_honest_one_is_not() -> None:
    for seed in range(10):
        rng, witnesses = random.Random(seed), AuditAgreement(section())
        honest = [witnesses.look(step(rng, wrong_taken=0.05))[1] for _ in range(60)]
        assert not any(honest), seed
        fallen = [witnesses.look(step(rng, wrong_taken=0.5))[1] for _ in range(STEPS)]
        assert any("of the first" in message for message in fallen[:5]), seed
