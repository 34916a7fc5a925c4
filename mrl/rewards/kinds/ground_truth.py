"""Parse ground truths for each kind of reward, when rows are loaded."""

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
"""Texts that pandas, databases and spreadsheets write for a missing value."""


def parse_ground_truth(raw: Any, *, domain: str, section: RewardSection, place: str) -> Any:
    """Parse the answer of a row of `domain` into `Prompt.ground_truth`.

    If several verifiers need a ground truth, answer and result are objects with one entry per verifier name.

    Raises:
        DataError: if the answer is missing or unusable, or the domain has no verifier; names `place`.
    """
    try:
        parts = section.for_domain(domain).verifiers()
    except KeyError as error:
        raise DataError(f"{place}: domain {domain!r} has no verifier: {error.args[0]}") from error
    kinds = [reward_kind(part) for part in parts]
    if len(kinds) == 1:
        return _parse(raw, kinds[0], place)
    shared = sum(kind.needs_ground_truth and not kind.part.is_audit for kind in kinds) <= 1
    return {
        kind.part.label: _parse(
            raw if _takes_all(raw, kind, shared) else _entry(raw, kind.part, place), kind, place
        )
        for kind in kinds
    }


def _takes_all(raw: Any, kind: RewardKind, shared: bool) -> bool:
    """Return True if the verifier takes the row's whole answer; an audit verifier prefers its own entry."""
    is_named = isinstance(raw, dict) and kind.part.label in raw
    return not kind.needs_ground_truth or (shared and not (kind.part.is_audit and is_named))


def remarks(ground_truth: Any, *, domain: str, section: RewardSection) -> list[str]:
    """Return the remarks of the domain's kinds on a ground truth that `parse_ground_truth` returned."""
    parts = section.for_domain(domain).verifiers()
    kinds = [reward_kind(part) for part in parts]
    texts = [
        kind.remark(ground_truth_of(kind.part, ground_truth=ground_truth, alone=len(kinds) == 1))
        for kind in kinds
        if kind.needs_ground_truth
    ]
    return [text for text in texts if text]


def correct_response(section: RewardSection, prompt: Prompt) -> str | None:
    """Return a correct response, in the form of the first verifier that can write one; None if none can."""
    parts = section.for_domain(prompt.domain).verifiers()
    for part in parts:
        truth = ground_truth_of(part, ground_truth=prompt.ground_truth, alone=len(parts) == 1)
        if (text := reward_kind(part).right_response(truth)) is not None:
            return text
    return None


def ground_truth_of(part: RewardPart, *, ground_truth: Any, alone: bool) -> Any:
    """Return one verifier's part of a prompt's ground truth."""
    return ground_truth if alone else ground_truth[part.label]


def _entry(raw: Any, part: RewardPart, place: str) -> Any:
    if not isinstance(raw, dict) or part.label not in raw:
        raise DataError(
            f"{place}: the answer has no entry {part.label!r}, but several verifiers of this domain need a "
            f"ground truth; give an object with one entry per verifier instead of {str(raw)[:80]!r}"
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
            f"{place}: the ground truth is {str(raw).strip()}, which marks a missing value; "
            f"the verifier {kind.part.label!r} needs one"
        )
    if isinstance(raw, float) and math.isinf(raw):
        raise DataError(
            f"{place}: the ground truth is {raw}, which JSON cannot represent as a number; write it as text"
        )
    return kind.parse_ground_truth(raw, place=place)
