"""Finding the one final answer of a response. Linear in the response's length; nothing is evaluated.

Only text after the last closing think tag counts. Places are tried in the order of the rules; the first
place that holds anything decides, so that a second place gives no second chance.
"""

from __future__ import annotations

import dataclasses
import re

from mrl.config.sections.reward import MathsRules
from mrl.rewards.maths.numbers import exact_number, tidy

MAX_CANDIDATES = 32
"""More final answers than this in one place are hedging."""

_ANSWER = re.compile(r"\banswer[*_]{0,3}[ \t]{0,3}:", re.IGNORECASE)
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)[ ]?\{")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The final answer, or why there is none."""

    text: str | None
    """Tidied."""
    reason: str = ""


def final_answer(response: str, rules: MathsRules) -> Answer:
    """The single final answer of a response."""
    visible = response.rpartition("</think>")[2]
    for place in rules.extraction:
        candidates = _PLACES[place](visible, rules)
        if candidates:
            return _single(candidates, place, rules)
    return Answer(None, "no final answer")


def _single(candidates: list[str], place: str, rules: MathsRules) -> Answer:
    if len(candidates) > MAX_CANDIDATES:
        return Answer(None, f"more than {MAX_CANDIDATES} final answers ({place})")
    if any(len(text) > rules.max_answer_chars for text in candidates):
        return Answer(None, f"final answer longer than {rules.max_answer_chars} characters ({place})")
    answers = list(dict.fromkeys(tidy(text) for text in candidates))
    if len(answers) > 1 and rules.on_conflict == "wrong":
        return Answer(None, f"{len(answers)} different final answers ({place})")
    answer = answers[-1] if rules.on_conflict == "wrong" else tidy(candidates[-1])
    return Answer(answer) if answer else Answer(None, f"empty final answer ({place})")


def _boxed(text: str, rules: MathsRules) -> list[str]:
    candidates: list[str] = []
    covered = 0
    for opening in _BOX.finditer(text):
        if opening.start() < covered:
            continue  # a box inside a box belongs to the outer one
        content = _braced(text, opening.end(), rules.max_answer_chars)
        if content is None:
            continue
        candidates.append(content)
        covered = opening.end() + len(content)
        if len(candidates) > MAX_CANDIDATES:
            break
    return candidates


def _braced(text: str, start: int, limit: int) -> str | None:
    """Content up to the brace that closes the one before `start`; text over the limit stands for "too long"."""
    depth = 1
    end = min(len(text), start + limit + 1)
    position = start
    while position < end:
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return text[start:end] if end == start + limit + 1 else None


def _gsm8k(text: str, rules: MathsRules) -> list[str]:
    return _rests_of_lines(text, [match.end() for match in re.finditer("####", text)], rules)


def _answer(text: str, rules: MathsRules) -> list[str]:
    return _rests_of_lines(text, [match.end() for match in _ANSWER.finditer(text)], rules)


def _rests_of_lines(text: str, starts: list[int], rules: MathsRules) -> list[str]:
    rests: list[str] = []
    for start in starts[: MAX_CANDIDATES + 1]:
        end = text.find("\n", start, start + rules.max_answer_chars + 8)
        rests.append(text[start : end if end >= 0 else start + rules.max_answer_chars + 8].strip("*_ \t\r"))
    return rests


def _last_number(text: str, rules: MathsRules) -> list[str]:
    candidates = _NUMBER.findall(text[-20 * rules.max_answer_chars :])
    return [candidates[-1].rstrip(",")] if candidates else []


def _whole_response(text: str, rules: MathsRules) -> list[str]:
    """The response itself, where it is nothing but a number."""
    text = text.strip()
    if not text or len(text) > rules.max_answer_chars or "\n" in text:
        return []
    return [text] if exact_number(tidy(text), percent=rules.percent) is not None else []


_PLACES = {
    "boxed": _boxed,
    "gsm8k": _gsm8k,
    "answer": _answer,
    "last_number": _last_number,
    "whole_response": _whole_response,
}
