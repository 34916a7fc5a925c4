"""The maths verifier in two stages: an exact integer and rational path, then symbolic comparison (only where
it can be killed).

Owns what is right and what a ground truth may be; deadlines and processes are the pool's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mrl.config.sections.reward import MathsRules
from mrl.errors import DataError
from mrl.rewards.contract import Request, RewardKind, Stage, scored
from mrl.rewards.maths.answers import answer_key, final_answer, marked_answers
from mrl.rewards.maths.numbers import exact_number, tidy
from mrl.samples import Verdict

NAME = "maths"
VERSION = "1"

_LAST_BOX = {"extraction": ("boxed",), "on_conflict": "last"}

_exact_ground_truth = functools.lru_cache(maxsize=4096)(exact_number)


def verify_exactly(response: str, ground_truth: str, rules: MathsRules) -> Verdict | None:
    """The verdict where plain numbers decide; None where a symbolic comparison has to."""
    answer = final_answer(response, rules)
    if answer.text is None:
        return scored(0.0, answer.reason)
    percent = "value" if rules.percent == "value" else "ignore"
    right = _exact_ground_truth(tidy(ground_truth), percent=percent)
    answered = exact_number(answer.text, percent=rules.percent if "%" not in ground_truth else percent)
    if right is not None and answered is not None:
        equal = abs(answered - right) <= rules.relative_tolerance * abs(right)
        return scored(
            float(equal), "equal numbers" if equal else f"{_short(answer.text)}, not {_short(ground_truth)}"
        )
    if answer.text == tidy(ground_truth):
        return scored(1.0, "same text")
    if not rules.symbolic:
        return scored(0.0, f"{_short(answer.text)} is no number")
    return None


def verify_symbolically(response: str, ground_truth: str, rules: MathsRules) -> Verdict:
    """The slow path; only for processes that can be killed."""
    from mrl.rewards.maths.symbolic import compare

    answer = final_answer(response, rules)
    if answer.text is None:
        return scored(0.0, answer.reason)
    return compare(answer.text, tidy(ground_truth), rules)


def parse_ground_truth(raw: object, *, rules: MathsRules, place: str) -> str:
    """The ground truth as tidy text: of a solution that boxes its answer, the last box. Raises DataError for
    one that nothing could equal."""
    text = tidy(str(raw)) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
    if text and "boxed" in text:
        text = final_answer(text, rules.model_copy(update=_LAST_BOX)).text
    if not text:
        raise DataError(f"{place}: a ground truth is a number or text, not {raw!r}")
    if exact_number(text) is not None:
        return text
    if not rules.symbolic:
        raise DataError(
            f"{place}: the ground truth {text[:80]!r} is no number and reward.maths.symbolic is false"
        )
    from mrl.rewards.maths.symbolic import parse_ground_truth as check

    try:
        check(text)
    except ValueError as error:
        raise DataError(
            f"{place}: the ground truth {text[:80]!r} cannot be compared with: {error}"
        ) from error
    return text


def _short(text: str) -> str:
    return ascii(text[:40])


class Maths(RewardKind):
    """Exact numbers first, in batches; what they leave open is compared symbolically in a child that can be
    killed."""

    needs_ground_truth = True
    stages = (Stage("exact", batch_size=64), Stage("symbolic", in_child=True, keeps_deadline=True))

    def used_stages(self) -> tuple[Stage, ...]:
        return self.stages if self.rules.symbolic else self.stages[:1]

    def verifier(self, stage: Stage) -> MathsVerifier:
        return MathsVerifier(self.rules, in_child=stage.in_child)

    def parse_ground_truth(self, raw: Any, *, place: str) -> str:
        return parse_ground_truth(raw, rules=self.rules, place=place)

    def reading(self, request: Request) -> Mapping[str, str]:
        answer = final_answer(request.visible, self.rules)
        return {
            "place": answer.place or f"none of {', '.join(self.rules.extraction)}",
            "read": answer.reason if answer.text is None else answer.text,
            "compared with": str(request.ground_truth),
        }

    def is_given_away(self, prompt: str, ground_truth: Any) -> bool:
        return answer_key(tidy(ground_truth)) in map(answer_key, marked_answers(prompt, self.rules))


class MathsVerifier:
    """One stage of the maths verifier."""

    name, version = NAME, VERSION

    def __init__(self, rules: MathsRules, *, in_child: bool) -> None:
        self._rules = rules
        self._verify = verify_symbolically if in_child else verify_exactly
        if in_child:
            from mrl.rewards.maths.symbolic import compare

            compare("1+x", "x+1", rules)  # before the fork, so that no child spends its deadline on imports

    async def score(self, request: Request) -> Verdict | None:
        return self._verify(request.visible, request.ground_truth, self._rules)
