"""Gold answers as each kind of judge wants them, checked when rows are loaded."""

from __future__ import annotations

from typing import Any

from mrl.config.sections.reward import JudgePart, JudgeSection
from mrl.errors import DataError
from mrl.rewards.maths import verifier

_NEEDS_GOLD = ("maths", "code", "code_service", "instructions")


def parse_gold(raw: Any, *, domain: str, section: JudgeSection, place: str) -> Any:
    """What goes into Prompt.gold for a row of `domain`.

    With several judges that need a gold, the row's answer is an object with an entry per judge's name, and so is the
    result. Raises DataError naming the place for a missing or unusable answer and for a domain without a judge.
    """
    try:
        spec = section.for_domain(domain)
    except KeyError as error:
        raise DataError(f"{place}: domain {domain!r} has no judge: {error.args[0]}") from error
    judges = spec.judges()
    needing = [part for part in judges if part.kind in _NEEDS_GOLD]
    if len(judges) == 1:
        return _parse(raw, judges[0], place)
    shared = len(needing) <= 1
    parsed: dict[str, Any] = {}
    for part in judges:
        own = raw if shared or part.kind not in _NEEDS_GOLD else _entry(raw, part, place)
        parsed[part.label] = _parse(own, part, place)
    return parsed


def gold_of(part: JudgePart, *, gold: Any, alone: bool) -> Any:
    """The gold of one judge out of a Prompt's."""
    return gold if alone else gold[part.label]


def _entry(raw: Any, part: JudgePart, place: str) -> Any:
    if not isinstance(raw, dict) or part.label not in raw:
        raise DataError(
            f"{place}: several judges of this domain need a gold, so the answer is an object with an entry per judge; "
            f"{part.label!r} is missing in {str(raw)[:80]!r}"
        )
    return raw[part.label]


def _parse(raw: Any, part: JudgePart, place: str) -> Any:
    if part.kind not in _NEEDS_GOLD:
        return raw
    if raw is None or raw == "":
        raise DataError(f"{place}: the row has no gold answer, and the judge {part.label!r} needs one")
    if part.kind == "maths":
        return verifier.parse_gold(raw, rules=part.maths, place=place)
    if part.kind == "instructions":
        from mrl.rewards.instructions.verifier import parse_checks

        return parse_checks(raw, place=place)
    from mrl.rewards.code.tasks import parse_task

    return parse_task(raw, place=place)
