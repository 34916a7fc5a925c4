"""Find the single final answer of a response, in linear time and without evaluating anything.

Only the visible text counts (`mrl.rewards.visible`). Places are tried in the order of the rules. The first
place with an answer decides, so that a second place gives no second chance. An empty box, the repeated
instruction ("\\boxed{your answer}") and a heading are not answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator

from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.numbers import Quantity, exact_number, exact_quantity, normalise_answer
from mrl.rewards.visible import answer_frames, visible_text

MAX_ANSWER_CHARS = 400
"""Longer answers are rejected before parsing."""
MAX_CANDIDATES = 32
"""More final answers in one place count as hedging."""
MAX_MARKS = 1000
"""Maximum number of marks of one kind that are looked at, with or without an answer."""
MARKED_PLACES = ("boxed", "gsm8k", "answer")
"""Places with a mark in front of the answer."""

_ANSWER = re.compile(r"\banswer[*_]{0,3}[ \t]{0,3}[:\uff1a]", re.IGNORECASE)
_HASHES = re.compile(r"#{4,}")
_LABEL = re.compile(r"[ \t*_]*(?:the |final )*answer[*_]{0,3}[ \t]{0,3}[:\uff1a]", re.IGNORECASE)
_HEADING = re.compile(r"(?:[0-9]{1,3}[.):] +)?(?:[^\W\d_]{4,}|[^\W\d_]{2,} [^\W\d_]{2,})")
"""Start of a heading: a word, or a list number and a word."""
_ALONE = re.compile(
    r"[-+$\u20ac\u00a3]{0,2}[0-9][0-9,./]*%?(?: ?[^\W\d_]+)?[.]?|[-+]?\\(?:[dt]?frac|sqrt)\S+"
    r"|\$.+\$|\\\(.+\\\)|\\\[.+\\\]"
)
"""Line that consists of one number, with or without a unit, or of one formula."""
_CLOSING_TAG = re.compile(r"(?:</[A-Za-z]{1,20}>[ \t\r]{0,4}){1,4}$")
_BLANK = re.compile(r"\s{0,100}")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)[ ]?\{")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_SINGLE = re.compile(r"\{([A-Za-z0-9])\}")
_SPACE = re.compile(r"(?<![0-9A-Za-z]) +| +(?![0-9A-Za-z])")
_FILLER = " \t.\u2026?_*$`'\"{}~"
_BRACKETED = re.compile(r"[\[<(](.*[^\W\d_].*)[\])>]")
_PLACEHOLDERS = frozenset(
    ["", "answer", "the answer", "your answer", "final answer", "the final answer", "your final answer"]
    + ["answer here", "your answer here", "final answer here", "insert answer here", "see below", "see above"]
    + ["as follows", "\\", "\\,", "\\quad", "\\ldots", "\\dots", "\\cdots", "\\square"]
)
"""Texts in an answer's place that are not answers, without `_FILLER` and brackets around them."""


@dataclasses.dataclass(frozen=True, slots=True)
class FinalAnswer:
    """Final answer, or the reason why there is none."""

    text: str | None
    """Tidied answer; None if there is none."""
    reason: str = ""
    place: str = ""
    """Place that decided; empty if no place has an answer."""


def final_answer(response: str, rules: MathsRules) -> FinalAnswer:
    """Return the single final answer of a response's visible text."""
    visible = visible_text(response)
    for place in rules.extraction:
        candidates = _candidates(visible, place)
        if candidates:
            return _single(candidates, place, rules)
    return FinalAnswer(None, "no final answer")


def marked_answers(text: str) -> list[str]:
    """Return the different answers after marks of any kind, tidied; at most MAX_CANDIDATES + 1 per kind."""
    return _different(c for place in MARKED_PLACES for c in _candidates(text, place))


def comparison_key(text: str) -> Quantity | str:
    """Return a tidy answer in the form for `are_equal`: a number with its unit, or else the text without
    insignificant spaces and braces."""
    quantity = exact_quantity(text)
    return _SPACE.sub("", _SINGLE.sub(r"\1", text)) if quantity is None else quantity


def are_equal(one: Quantity | str, other: Quantity | str) -> bool:
    """Return True if two answers of one response are equal; a missing unit matches any unit."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    if one.unit is None or other.unit is None:
        return one.value == other.value
    same_kind = (one.unit.dimensions, one.unit.pi) == (other.unit.dimensions, other.unit.pi)
    return same_kind and one.value * one.unit.scale == other.value * other.unit.scale


def _candidates(visible: str, place: str) -> list[str]:
    texts = (text for text in _PLACES[place](visible) if not _is_placeholder(text))
    return list(itertools.islice(texts, MAX_CANDIDATES + 1))


def _is_placeholder(text: str) -> bool:
    if len(text) > 60:
        return False
    words = _TEXT.sub(r"\1", text).strip(_FILLER)
    bracketed = _BRACKETED.fullmatch(words)
    return (bracketed[1].strip(_FILLER) if bracketed else words).lower() in _PLACEHOLDERS


def _single(candidates: list[str], place: str, rules: MathsRules) -> FinalAnswer:
    if len(candidates) > MAX_CANDIDATES:
        return FinalAnswer(None, f"more than {MAX_CANDIDATES} final answers ({place})", place)
    if any(len(text) > MAX_ANSWER_CHARS for text in candidates):
        return FinalAnswer(None, f"final answer longer than {MAX_ANSWER_CHARS} characters ({place})", place)
    answers = _different(candidates) if rules.on_conflict == "wrong" else candidates
    if len(answers) > 1 and rules.on_conflict == "wrong":
        return FinalAnswer(None, f"{len(answers)} different final answers ({place})", place)
    last = normalise_answer(candidates[-1])
    return (
        FinalAnswer(last, place=place) if last else FinalAnswer(None, f"empty final answer ({place})", place)
    )


def _different(candidates: Iterable[str]) -> list[str]:
    """Return the tidied answers without duplicates; of two equal ones, keep the one with a unit."""
    texts = list(dict.fromkeys(normalise_answer(text) for text in candidates))
    if len(texts) < 2:
        return texts
    kept: list[tuple[Quantity | str, str]] = []
    for answer, text in sorted(((comparison_key(text), text) for text in texts), key=_has_no_unit):
        if not any(are_equal(answer, other) for other, _ in kept):
            kept.append((answer, text))
    return [text for _, text in kept]


def _has_no_unit(answer: tuple[Quantity | str, str]) -> bool:
    return getattr(answer[0], "unit", None) is None


def _boxed(text: str) -> Iterator[str]:
    covered = 0
    for opening in itertools.islice(_BOX.finditer(text), MAX_MARKS):
        if opening.start() < covered:
            continue  # a box inside a box belongs to the outer one
        content = _braced(text, opening.end(), MAX_ANSWER_CHARS)
        if content is None:
            continue
        yield _innermost(content)
        covered = opening.end() + len(content)


def _innermost(content: str) -> str:
    while (opening := _BOX.match(content)) and content.endswith("}"):
        content = content[opening.end() : -1]
    return content


def _braced(text: str, start: int, limit: int) -> str | None:
    """Return the content up to the closing brace; above the limit, return limit + 1 characters."""
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


def _gsm8k(text: str) -> Iterator[str]:
    """Yield the texts after ####; words with more text after their line are a level-4 heading."""
    last = len(text.rstrip())
    for mark in itertools.islice(_HASHES.finditer(text), MAX_MARKS):
        label = _LABEL.match(text, mark.end())
        answer, end = _rest_of_line(text, label.end() if label else mark.end())
        if end >= last or not _HEADING.match(answer):
            yield answer


def _answer(text: str) -> Iterator[str]:
    for mark in itertools.islice(_ANSWER.finditer(text), MAX_MARKS):
        yield _rest_of_line(text, mark.end())[0]


def _tags(text: str) -> Iterator[str]:
    """Yield the texts between answer tags."""
    for framed in answer_frames(text)[:MAX_MARKS]:
        yield framed.strip()[: MAX_ANSWER_CHARS + 1]


def _rest_of_line(text: str, start: int) -> tuple[str, int]:
    """Return the answer after a mark, and its end: the content of the line's only box, else the line.

    If the line is empty, take the next one if it is only a number or formula.
    """
    answer, end = _line(text, start)
    if not answer:
        following, end_of_following = _line(text, _next_line(text, end))
        if _ALONE.fullmatch(following):
            answer, end = following, end_of_following
    boxes = list(itertools.islice(_boxed(answer), 2))
    return boxes[0] if len(boxes) == 1 else answer, end


def _line(text: str, start: int) -> tuple[str, int]:
    limit = start + MAX_ANSWER_CHARS + 8
    end = text.find("\n", start, limit)
    end = min(limit, len(text)) if end < 0 else end
    return _CLOSING_TAG.sub("", text[start:end]).strip("*_ \t\r"), end


def _next_line(text: str, end: int) -> int:
    blank = _BLANK.match(text, end)
    return blank.end() if blank else end


def _last_number(text: str) -> list[str]:
    candidates = _NUMBER.findall(text[-20 * MAX_ANSWER_CHARS :])
    return [candidates[-1].rstrip(",")] if candidates else []


def _whole_response(text: str) -> list[str]:
    """Return the response itself if it is only a number."""
    text = text.strip()
    if not text or len(text) > MAX_ANSWER_CHARS or "\n" in text:
        return []
    return [text] if exact_number(normalise_answer(text)) is not None else []


_PLACES = {
    "boxed": _boxed,
    "gsm8k": _gsm8k,
    "answer": _answer,
    "answer_tags": _tags,
    "last_number": _last_number,
    "whole_response": _whole_response,
}
