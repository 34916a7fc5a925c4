"""Rewards for a response's shape: tags in order, one final answer, no repetition. All linear in the length."""

from __future__ import annotations

from mrl.config.sections.reward import FormatRules, MathsRules, RepetitionRules
from mrl.rewards.contract import Request, scored
from mrl.rewards.maths.answers import final_answer
from mrl.samples import Verdict

_PLACES = MathsRules(extraction=("boxed", "hashes", "answer"))


def verify_format(response: str, rules: FormatRules) -> Verdict:
    """1 for a response in shape, else 0 with the first thing that is not."""
    wrong = _objection(response, rules)
    return scored(float(not wrong), wrong or "in shape")


def verify_repetition(response: str, rules: RepetitionRules) -> Verdict:
    """Minus max_penalty times the share of n-grams (of words) that occurred before; 0 for a text without n-grams."""
    words = response.lower().split()
    num_ngrams = len(words) - rules.ngram + 1
    if num_ngrams <= 0:
        return scored(0.0, "shorter than one n-gram")
    distinct = {tuple(words[start : start + rules.ngram]) for start in range(num_ngrams)}
    share = 1.0 - len(distinct) / num_ngrams
    return scored(
        -rules.max_penalty * share if share else 0.0, f"{share:.3f} of the {rules.ngram}-grams repeat"
    )


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
        if not response[start + len(opening) : end].strip():
            return f"{opening} is empty"
        position = end + len(closing)
    if rules.final_answer:
        visible = response.partition(f"</{rules.tags[0]}>")[2] if rules.tags else response
        answer = final_answer(visible, _PLACES)
        if answer.text is None:
            return answer.reason
    return ""


class FormatVerifier:
    """Scores with `verify_format`."""

    name, version = "format", "1"

    def __init__(self, rules: FormatRules) -> None:
        self._rules = rules

    async def score(self, request: Request) -> Verdict:
        return verify_format(request.response, self._rules)


class RepetitionVerifier:
    """Scores with `verify_repetition`."""

    name, version = "repetition", "1"

    def __init__(self, rules: RepetitionRules) -> None:
        self._rules = rules

    async def score(self, request: Request) -> Verdict:
        return verify_repetition(request.response, self._rules)
