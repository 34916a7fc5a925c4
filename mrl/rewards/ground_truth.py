"""Ground truths as each kind of verifier wants them, checked when rows are loaded."""

from __future__ import annotations

from typing import Any

from mrl.config.sections.reward import RewardPart, RewardSection
from mrl.errors import DataError
from mrl.rewards.maths import verifier

_NEEDS_GROUND_TRUTH = ("maths", "code", "code_service", "instructions")


def parse_ground_truth(raw: Any, *, domain: str, section: RewardSection, place: str) -> Any:
    """What goes into Prompt.ground_truth for a row of `domain`.

    With several verifiers that need a ground truth, the row's answer is an object with an entry per verifier's name, and so is the
    result. Raises DataError naming the place for a missing or unusable answer and for a domain without a verifier.
    """
    try:
        spec = section.for_domain(domain)
    except KeyError as error:
        raise DataError(f"{place}: domain {domain!r} has no verifier: {error.args[0]}") from error
    verifiers = spec.verifiers()
    needing = [part for part in verifiers if part.kind in _NEEDS_GROUND_TRUTH]
    if len(verifiers) == 1:
        return _parse(raw, verifiers[0], place)
    shared = len(needing) <= 1
    parsed: dict[str, Any] = {}
    for part in verifiers:
        own = raw if shared or part.kind not in _NEEDS_GROUND_TRUTH else _entry(raw, part, place)
        parsed[part.label] = _parse(own, part, place)
    return parsed


def ground_truth_of(part: RewardPart, *, ground_truth: Any, alone: bool) -> Any:
    """The ground truth of one verifier out of a Prompt's."""
    return ground_truth if alone else ground_truth[part.label]


def _entry(raw: Any, part: RewardPart, place: str) -> Any:
    if not isinstance(raw, dict) or part.label not in raw:
        raise DataError(
            f"{place}: several verifiers of this domain need a ground truth, so the answer is an object with an entry per verifier; "
            f"{part.label!r} is missing in {str(raw)[:80]!r}"
        )
    return raw[part.label]


def _parse(raw: Any, part: RewardPart, place: str) -> Any:
    if part.kind not in _NEEDS_GROUND_TRUTH:
        return raw
    if raw is None or raw == "":
        raise DataError(f"{place}: the row has no ground truth, and the verifier {part.label!r} needs one")
    if part.kind == "maths":
        return verifier.parse_ground_truth(raw, rules=part.maths, place=place)
    if part.kind == "instructions":
        from mrl.rewards.instructions.verifier import parse_checks

        return parse_checks(raw, place=place)
    from mrl.rewards.code.tasks import parse_task

    return parse_task(raw, place=place)
