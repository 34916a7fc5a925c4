"""Judge cases in this process, without a pool, and compare the verdicts."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterable
from typing import Any

from mrl.rewards.contract import RewardKind, RewardRequest
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import KindPart
from mrl.samples import Verdict
from tests.support.verifier_cases.case import Case

LEAST_PENALTY = -0.05
"""Smaller penalties do not count: ordinary text repeats a little."""


def agrees(case: Case, value: float) -> bool:
    """Return True if a correct response got the full reward, and an incorrect one did not."""
    return (value > LEAST_PENALTY if case.kind == "repetition" else value >= 1.0) == case.right


def part_of(case: Case) -> KindPart:
    return _part(case.kind, json.dumps(dict(case.settings), sort_keys=True))


@functools.cache
def _part(kind: str, settings: str) -> KindPart:
    return KindPart.model_validate({"kind": kind, kind: json.loads(settings)})


def ground_truth_of(case: Case, kind: RewardKind) -> Any:
    """Return the case's ground truth as the loader parses it."""
    if not kind.needs_ground_truth:
        return case.ground_truth
    return kind.parse_ground_truth(case.ground_truth, place=case.label)


def verdict_of(case: Case) -> Verdict:
    """Return the verdict of the kind's stages, run in order."""
    kind = reward_kind(part_of(case))
    request = RewardRequest("0.0", 0, case.response, ground_truth_of(case, kind))
    for stage in kind.used_stages():
        verdict = asyncio.run(kind.verifier(stage).score(request))  # type: ignore[union-attr]
        if verdict is not None:
            return verdict
    raise AssertionError(f"no stage of {case.kind} decides {case.label}")


def misjudged(cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if not agrees(case, float(verdict_of(case).value or 0.0))]
