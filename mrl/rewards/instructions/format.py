"""Rewards for a response's format: tags in order, one final answer, no repetition. All take linear time."""

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
"""Longer runs without a space count as one unit per character; rules (----) and long names are shorter."""


def verify_format(response: str, rules: FormatRules) -> Verdict:
    """Return 1 if the format is correct, else 0 with the first fault as reason."""
    fault = _fault(response, rules)
    return scored(float(not fault), fault or "correct format")


def verify_repetition(response: str, rules: RepetitionRules) -> Verdict:
    """Return minus the share of repeated n-grams; 0 for a text shorter than one n-gram.

    The units of n-grams are words; in scripts without spaces and in runs above LONGEST_WORD, characters.
    """
    units = _units(response)
    num_ngrams = len(units) - rules.ngram + 1
    if num_ngrams <= 0:
        return scored(0.0, "shorter than one n-gram")
    distinct = {hash(tuple(units[start : start + rules.ngram])) for start in range(num_ngrams)}
    share = 1.0 - len(distinct) / num_ngrams
    return scored(-share if share else 0.0, f"{share:.3f} of the {rules.ngram}-grams repeat")


def _units(response: str) -> list[str]:
    words = _UNITS.findall(prose(plain_text(response)).lower())
    return [unit for word in words for unit in (word if len(word) > LONGEST_WORD else (word,))]


def _fault(response: str, rules: FormatRules) -> str:
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
        return _answer_fault(visible_text(after))
    return ""


def _answer_fault(visible: str) -> str:
    answers = marked_answers(visible)
    if len(answers) == 1:
        return ""
    return f"{len(answers)} different final answers" if answers else "no final answer"


def format_verifier(rules: FormatRules) -> TextVerifier:
    """Return a verifier that uses `verify_format` on the response and any thought that the prompt opened."""
    return TextVerifier(
        "format", lambda request: verify_format(with_opened_thought(request.response, request.prompt), rules)
    )


def repetition_verifier(rules: RepetitionRules) -> TextVerifier:
    """Return a verifier that uses `verify_repetition`."""
    return TextVerifier("repetition", lambda request: verify_repetition(request.response, rules))


class TextVerifier:
    """Verifier that looks at a response's text only."""

    version = "2"

    def __init__(self, name: str, verify: Callable[[RewardRequest], Verdict]) -> None:
        self.name, self._verify = name, verify

    async def score(self, request: RewardRequest) -> Verdict:
        return self._verify(request)
