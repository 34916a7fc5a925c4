"""Verifier `maths` in two stages: exact numbers, then comparison by shape in a process that can be killed.

It decides what is correct and what a ground truth may be; the reward pool owns deadlines and processes.
"""

from __future__ import annotations

import functools
from fractions import Fraction

from mrl.errors import DataError
from mrl.rewards.contract import RewardRequest, scored
from mrl.rewards.maths.answers import comparison_key, final_answer
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.numbers import Quantity, as_numerals, exact_quantity, normalise_answer
from mrl.samples import Verdict

NAME = "maths"
VERSION = "2"

_LAST_BOX = {"extraction": ("boxed",), "on_conflict": "last"}

_ground_truth_quantity = functools.lru_cache(maxsize=4096)(exact_quantity)


def verify_exactly(response: str, ground_truth: str, rules: MathsRules) -> Verdict | None:
    """Return the verdict if plain numbers or equal texts decide; None if shapes must be compared."""
    answer = final_answer(response, rules)
    if answer.text is None:
        return scored(0.0, answer.reason)
    if answer.text.casefold() == "nan":
        return scored(0.0, "nan is not a number")
    truth = normalise_answer(ground_truth)
    if answer.text == truth:
        return scored(1.0, "same text")
    text, truth = as_numerals(answer.text, truth)
    expected = _ground_truth_quantity(truth, single_letters=True)
    given = exact_quantity(text, single_letters=expected is not None and expected.unit is not None)
    if expected is not None and given is not None:
        return _compared(given, expected, rules, f"{_short(text)}, not {_short(truth)}")
    answer_key = comparison_key(text)
    if isinstance(answer_key, str) and answer_key == comparison_key(truth):
        return scored(1.0, "same text")
    if not rules.symbolic:
        return scored(0.0, f"{_short(text)} is not a number")
    return None


def _compared(given: Quantity, expected: Quantity, rules: MathsRules, mismatch: str) -> Verdict | None:
    """Compare two numbers; return None if converting their units takes a factor that is not rational."""
    converted = given.unit and expected.unit and given.unit != expected.unit
    if given.is_quotient and expected.is_integer and not converted:
        return scored(0.0, "the answer is an unevaluated quotient, but the ground truth is an integer")
    left, right = given.value, expected.value
    if given.unit and expected.unit:
        if given.unit.dimensions != expected.unit.dimensions:
            return scored(0.0, f"a different kind of unit: {mismatch}")
        if given.unit.pi != expected.unit.pi:
            return None if rules.symbolic else scored(0.0, mismatch)
        left, right = left * given.unit.scale, right * expected.unit.scale
    equal = abs(left - right) <= Fraction(rules.relative_tolerance) * abs(right)
    return scored(float(equal), "equal numbers" if equal else mismatch)


def verify_symbolically(response: str, ground_truth: str, rules: MathsRules) -> Verdict:
    """Compare by shape. Slow: call it only in a process that can be killed."""
    from mrl.rewards.maths.symbolic import compare

    answer = final_answer(response, rules)
    if answer.text is None:
        return scored(0.0, answer.reason)
    return compare(*as_numerals(answer.text, normalise_answer(ground_truth)), rules)


def parse_maths_ground_truth(raw: object, *, rules: MathsRules, place: str) -> str:
    """Return the ground truth as tidy text; a solution with boxes gives its last box. Raises DataError if no
    answer could equal it."""
    text = (
        normalise_answer(str(raw))
        if isinstance(raw, str | int | float) and not isinstance(raw, bool)
        else None
    )
    if text and "boxed" in text:
        text = final_answer(text, rules.model_copy(update=_LAST_BOX)).text
    if not text:
        raise DataError(f"{place}: the ground truth must be a number or text, not {raw!r}")
    if exact_quantity(text) is None and not rules.symbolic:
        raise DataError(
            f"{place}: the ground truth {text[:80]!r} is not a number; set reward.maths.symbolic = true"
        )
    return text


def _short(text: str) -> str:
    return ascii(text[:40])


class MathsVerifier:
    """Verifier of one stage of the kind `maths`."""

    name, version = NAME, VERSION

    def __init__(self, rules: MathsRules, *, in_child: bool) -> None:
        self._rules = rules
        self._verify = verify_symbolically if in_child else verify_exactly
        if in_child:
            from mrl.rewards.maths.symbolic import compare

            # Import before the fork, so that no child spends its deadline on it.
            compare("\\sqrt{8}", "\\sqrt{2}", rules)
            compare("2x = x^2", "3x = x^2", rules)

    async def score(self, request: RewardRequest) -> Verdict | None:
        return self._verify(request.visible, request.ground_truth, self._rules)
