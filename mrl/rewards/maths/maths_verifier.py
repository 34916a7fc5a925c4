"""The maths verifier in two stages: an exact integer and rational path, then comparison by shape (only where
it can be killed).

Owns what is right and what a ground truth may be; deadlines and processes are the pool's.
"""

from __future__ import annotations

import functools
from fractions import Fraction

from mrl.errors import DataError
from mrl.rewards.contract import RewardRequest, scored
from mrl.rewards.maths.answers import final_answer, read_answer
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.numbers import Quantity, as_numerals, exact_quantity, tidy
from mrl.samples import Verdict

NAME = "maths"
VERSION = "2"

_LAST_BOX = {"extraction": ("boxed",), "on_conflict": "last"}

_ground_truth_quantity = functools.lru_cache(maxsize=4096)(exact_quantity)


def verify_exactly(response: str, ground_truth: str, rules: MathsRules) -> Verdict | None:
    """The verdict where plain numbers decide; None where a comparison of shapes has to."""
    answer = final_answer(response, rules)
    if answer.text is None:
        return scored(0.0, answer.reason)
    if answer.text.casefold() == "nan":
        return scored(0.0, "nan is no number")
    wanted = tidy(ground_truth)
    if answer.text == wanted:
        return scored(1.0, "same text")
    text, wanted = as_numerals(answer.text, wanted)
    right = _ground_truth_quantity(wanted, single_letters=True)
    given = exact_quantity(text, single_letters=right is not None and right.unit is not None)
    if right is not None and given is not None:
        return _compared(given, right, rules, f"{_short(text)}, not {_short(wanted)}")
    read = read_answer(text)
    if isinstance(read, str) and read == read_answer(wanted):
        return scored(1.0, "same text")
    if not rules.symbolic:
        return scored(0.0, f"{_short(text)} is no number")
    return None


def _compared(given: Quantity, right: Quantity, rules: MathsRules, otherwise: str) -> Verdict | None:
    """Two numbers; None where units have to be converted by something that is not rational."""
    converted = given.unit and right.unit and given.unit != right.unit
    if given.is_quotient and right.is_integer and not converted:
        return scored(0.0, "a quotient that is not worked out, where the ground truth is an integer")
    left, wanted = given.value, right.value
    if given.unit and right.unit:
        if given.unit.dimensions != right.unit.dimensions:
            return scored(0.0, f"another kind of unit: {otherwise}")
        if given.unit.pi != right.unit.pi:
            return None if rules.symbolic else scored(0.0, otherwise)
        left, wanted = left * given.unit.scale, wanted * right.unit.scale
    equal = abs(left - wanted) <= Fraction(rules.relative_tolerance) * abs(wanted)
    return scored(float(equal), "equal numbers" if equal else otherwise)


def verify_symbolically(response: str, ground_truth: str, rules: MathsRules) -> Verdict:
    """The slow path; only for processes that can be killed."""
    from mrl.rewards.maths.symbolic import compare

    answer = final_answer(response, rules)
    if answer.text is None:
        return scored(0.0, answer.reason)
    return compare(*as_numerals(answer.text, tidy(ground_truth)), rules)


def parse_maths_ground_truth(raw: object, *, rules: MathsRules, place: str) -> str:
    """The ground truth as tidy text: of a solution that boxes its answer, the last box. Raises DataError for
    one that nothing could equal."""
    text = tidy(str(raw)) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
    if text and "boxed" in text:
        text = final_answer(text, rules.model_copy(update=_LAST_BOX)).text
    if not text:
        raise DataError(f"{place}: a ground truth is a number or text, not {raw!r}")
    if exact_quantity(text) is None and not rules.symbolic:
        raise DataError(
            f"{place}: the ground truth {text[:80]!r} is no number and reward.maths.symbolic is false"
        )
    return text


def _short(text: str) -> str:
    return ascii(text[:40])


class MathsVerifier:
    """One stage of the maths verifier."""

    name, version = NAME, VERSION

    def __init__(self, rules: MathsRules, *, in_child: bool) -> None:
        self._rules = rules
        self._verify = verify_symbolically if in_child else verify_exactly
        if in_child:
            from mrl.rewards.maths.symbolic import compare

            # Before the fork, so that no child spends its deadline on imports.
            compare("\\sqrt{8}", "\\sqrt{2}", rules)
            compare("2x = x^2", "3x = x^2", rules)

    async def score(self, request: RewardRequest) -> Verdict | None:
        return self._verify(request.visible, request.ground_truth, self._rules)
