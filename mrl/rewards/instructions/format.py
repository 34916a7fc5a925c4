"""Rewards for a response's shape: tags in order, one final answer, no repetition. All linear in the length."""

from __future__ import annotations

from collections.abc import Callable

from mrl.config.sections.reward import FormatRules, MathsRules, RepetitionRules
from mrl.rewards.contract import Request, RewardKind, Stage, scored
from mrl.rewards.maths.answers import final_answer
from mrl.samples import Verdict

_PLACES = MathsRules(extraction=("boxed", "gsm8k", "answer"))


def verify_format(response: str, rules: FormatRules) -> Verdict:
    """1 for a response in shape, else 0 with the first thing that is not."""
    wrong = _objection(response, rules)
    return scored(float(not wrong), wrong or "in shape")


def verify_repetition(response: str, rules: RepetitionRules) -> Verdict:
    """Minus max_penalty times the share of n-grams (of words) that occurred before; 0 for a text without
    n-grams."""
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


class Format(RewardKind):
    """The shape of a response."""

    stages = (Stage(batch_size=32),)

    def verifier(self, stage: Stage) -> ShapeVerifier:
        return ShapeVerifier("format", lambda response: verify_format(response, self.rules))


class Repetition(RewardKind):
    """A penalty for repeated text."""

    stages = (Stage(batch_size=32),)

    def verifier(self, stage: Stage) -> ShapeVerifier:
        return ShapeVerifier("repetition", lambda response: verify_repetition(response, self.rules))


class ShapeVerifier:
    """Scores a response by its text alone."""

    version = "1"

    def __init__(self, name: str, verify: Callable[[str], Verdict]) -> None:
        self.name, self._verify = name, verify

    async def score(self, request: Request) -> Verdict:
        return self._verify(request.response)
