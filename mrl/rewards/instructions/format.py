"""Rewards for a response's shape: tags in order, one final answer, no repetition. All linear in the length."""

from __future__ import annotations

import re
from collections.abc import Callable

from mrl.rewards.contract import RewardRequest, scored
from mrl.rewards.instructions.checks import UNSPACED
from mrl.rewards.instructions.instruction_rules import FormatRules, RepetitionRules
from mrl.rewards.instructions.plain_text import plain_text, prose
from mrl.rewards.maths.answers import marked_answers
from mrl.rewards.visible import visible_text, with_opened_thought
from mrl.samples import Verdict

_UNITS = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
LONGEST_WORD = 80
"""Longer runs without a space count character by character: rules and long names are shorter."""


def verify_format(response: str, rules: FormatRules) -> Verdict:
    """1 for a response in shape, else 0 with the first thing that is not."""
    wrong = _objection(response, rules)
    return scored(float(not wrong), wrong or "in shape")


def verify_repetition(response: str, rules: RepetitionRules) -> Verdict:
    """Minus the share of n-grams that occurred before; 0 for a text without n-grams.

    N-grams are of words; of characters in scripts without spaces, and in runs that no word is as long as.
    """
    units = _units(response)
    num_ngrams = len(units) - rules.ngram + 1
    if num_ngrams <= 0:
        return scored(0.0, "shorter than one n-gram")
    distinct = {hash(tuple(units[start : start + rules.ngram])) for start in range(num_ngrams)}
    share = 1.0 - len(distinct) / num_ngrams
    return scored(-share if share else 0.0, f"{share:.3f} of the {rules.ngram}-grams repeat")


def _units(response: str) -> list[str]:
    found = _UNITS.findall(prose(plain_text(response)).lower())
    return [unit for word in found for unit in (word if len(word) > LONGEST_WORD else (word,))]


def _objection(response: str, rules: FormatRules) -> str:
    position = 0
    for tag in rules.tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        for text in (opening, closing):
            if response.count(text) != 1:
                return f"{text} occurs {response.count(text)} times"
        start, end = response.find(opening), response.find(closing)
        if start < position or end < start:
            return f"{opening} is out of order"
        if not plain_text(response[start + len(opening) : end]).strip():
            return f"{opening} is empty"
        position = end + len(closing)
    if rules.final_answer:
        after = response.partition(f"</{rules.tags[0]}>")[2] if rules.tags else response
        return _objection_to_answers(visible_text(after))
    return ""


def _objection_to_answers(visible: str) -> str:
    """What is wrong with the answers behind marks of every kind: exactly one is right."""
    answers = marked_answers(visible)
    if len(answers) == 1:
        return ""
    return f"{len(answers)} different final answers" if answers else "no final answer"


def format_verifier(rules: FormatRules) -> ShapeVerifier:
    """Scores with `verify_format`, a thought that the prompt opened included."""
    return ShapeVerifier(
        "format", lambda request: verify_format(with_opened_thought(request.response, request.prompt), rules)
    )


def repetition_verifier(rules: RepetitionRules) -> ShapeVerifier:
    """Scores with `verify_repetition`."""
    return ShapeVerifier("repetition", lambda request: verify_repetition(request.response, rules))


class ShapeVerifier:
    """Scores a response by its text alone."""

    version = "2"

    def __init__(self, name: str, verify: Callable[[RewardRequest], Verdict]) -> None:
        self.name, self._verify = name, verify

    async def score(self, request: RewardRequest) -> Verdict:
        return self._verify(request)
