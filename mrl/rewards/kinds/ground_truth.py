"""Ground truths as each kind of reward wants them, checked when rows are loaded."""

from __future__ import annotations

import math
from typing import Any

from mrl.errors import DataError
from mrl.rewards.contract import RewardKind
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.reward_part import RewardPart
from mrl.samples import Prompt

_MISSING = frozenset(("nan", "NaN", "-nan", "<NA>", "NaT", "null", "NULL", "#N/A"))
"""Texts that pandas, databases and spreadsheets write for a value that is not there."""


def parse_ground_truth(raw: Any, *, domain: str, section: RewardSection, place: str) -> Any:
    """What goes into Prompt.ground_truth for a row of `domain`.

    With several verifiers that need a ground truth, the row's answer is an object with an entry per
    verifier's name, and so is the result. Raises DataError naming the place for a missing or unusable answer
    and for a domain without a verifier.
    """
    try:
        parts = section.for_domain(domain).verifiers()
    except KeyError as error:
        raise DataError(f"{place}: domain {domain!r} has no verifier: {error.args[0]}") from error
    kinds = [reward_kind(part) for part in parts]
    if len(kinds) == 1:
        return _parse(raw, kinds[0], place)
    shared = sum(kind.needs_ground_truth and not kind.part.is_witness for kind in kinds) <= 1
    return {
        kind.part.label: _parse(
            raw if _takes_all(raw, kind, shared) else _entry(raw, kind.part, place), kind, place
        )
        for kind in kinds
    }


def _takes_all(raw: Any, kind: RewardKind, shared: bool) -> bool:
    """Whether a row's answer is the verifier's as it stands; a witness has an entry of its own, or what the others have."""
    is_named = isinstance(raw, dict) and kind.part.label in raw
    return not kind.needs_ground_truth or (shared and not (kind.part.is_witness and is_named))


def remarks(ground_truth: Any, *, domain: str, section: RewardSection) -> list[str]:
    """What the domain's kinds remark on a parsed ground truth; for rows that `parse_ground_truth` took."""
    parts = section.for_domain(domain).verifiers()
    kinds = [reward_kind(part) for part in parts]
    said = [
        kind.remark(ground_truth_of(kind.part, ground_truth=ground_truth, alone=len(kinds) == 1))
        for kind in kinds
        if kind.needs_ground_truth
    ]
    return [remark for remark in said if remark]


def right_response(section: RewardSection, prompt: Prompt) -> str | None:
    """A response that is right in the form that the row's first verifier with a ground truth asks for; None where none
    says what that is."""
    parts = section.for_domain(prompt.domain).verifiers()
    for part in parts:
        truth = ground_truth_of(part, ground_truth=prompt.ground_truth, alone=len(parts) == 1)
        if (text := reward_kind(part).right_response(truth)) is not None:
            return text
    return None


def ground_truth_of(part: RewardPart, *, ground_truth: Any, alone: bool) -> Any:
    """The ground truth of one verifier out of a Prompt's."""
    return ground_truth if alone else ground_truth[part.label]


def _entry(raw: Any, part: RewardPart, place: str) -> Any:
    if not isinstance(raw, dict) or part.label not in raw:
        raise DataError(
            f"{place}: several verifiers of this domain need a ground truth, so the answer is an object with an entry "
            f"per verifier; {part.label!r} is missing in {str(raw)[:80]!r}"
        )
    return raw[part.label]


def _parse(raw: Any, kind: RewardKind, place: str) -> Any:
    if not kind.needs_ground_truth:
        return raw
    if raw is None or raw == "":
        raise DataError(
            f"{place}: the row has no ground truth, and the verifier {kind.part.label!r} needs one"
        )
    if (isinstance(raw, str) and raw.strip() in _MISSING) or (isinstance(raw, float) and math.isnan(raw)):
        raise DataError(
            f"{place}: the ground truth is {str(raw).strip()}, as writers of files write a missing value; the verifier "
            f"{kind.part.label!r} needs one"
        )
    if isinstance(raw, float) and math.isinf(raw):
        raise DataError(
            f"{place}: the ground truth is {raw}, which is no number that JSON has; write it as text"
        )
    return kind.parse_ground_truth(raw, place=place)
