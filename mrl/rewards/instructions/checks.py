"""The single checks instruction verifiers are composed of. Each is a pure function of the response and its
arguments.

All are linear in the response's length. Register one with `@check`; its keyword-only arguments are its
schema.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_type_hints

CHECKS: Mapping[str, Callable[..., bool]] = {}
"""Filled below, at import, and never after."""

Relation = Literal["at_least", "at_most", "exactly", "around"]

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")
_BULLET = re.compile(r"^\s{0,8}[*\-+]\s+\S", re.MULTILINE)
_NUMBERED = re.compile(r"^\s{0,8}[0-9]{1,3}[.)]\s+\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*[^*\n]{1,200}\*\*|(?<!\*)\*[^*\s][^*\n]{0,200}\*(?!\*)")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]{1,80}\]")
_SECTION = re.compile(r"^#{1,6}\s+\S", re.MULTILINE)


def check(function: Callable[..., bool]) -> Callable[..., bool]:
    """Register a check under its function's name."""
    CHECKS[function.__name__] = function  # type: ignore[index]
    return function


def arguments_error(name: str, arguments: Mapping[str, Any]) -> str:
    """What is wrong with a check's name or arguments; empty when nothing is."""
    if name not in CHECKS:
        return f"unknown check {name!r}; known: {', '.join(sorted(CHECKS))}"
    function = CHECKS[name]
    parameters = {
        p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    hints = get_type_hints(function)
    unknown = sorted(set(arguments) - set(parameters))
    missing = sorted(n for n, p in parameters.items() if p.default is p.empty and n not in arguments)
    if unknown or missing:
        return f"check {name!r}: unknown arguments {unknown}, missing {missing}"
    wrong = [n for n, value in arguments.items() if not _fits(value, hints[n])]
    return f"check {name!r}: arguments of a wrong type or value: {wrong}" if wrong else ""


def _fits(value: Any, hint: Any) -> bool:
    if hint == Relation:
        return value in get_args(Relation)
    if hint is int:
        return type(value) is int and value >= 0
    if hint is str:
        return isinstance(value, str) and bool(value)
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value)


def _holds(count: int, relation: Relation, asked: int) -> bool:
    """Around is up to a tenth off, and always up to one."""
    if relation == "exactly":
        return count == asked
    if relation == "around":
        return abs(count - asked) <= max(1, round(asked / 10))
    return count >= asked if relation == "at_least" else count <= asked


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _paragraphs(text: str) -> list[str]:
    return [
        part.strip() for part in re.split(r"\n[ \t]*\n|^\*{3}$", text, flags=re.MULTILINE) if part.strip()
    ]


@check
def num_words(text: str, *, relation: Relation, count: int) -> bool:
    """Number of words."""
    return _holds(len(_words(text)), relation, count)


@check
def num_sentences(text: str, *, relation: Relation, count: int) -> bool:
    """Number of sentences (ends of sentence followed by space or the end)."""
    return _holds(len(_SENTENCE_END.findall(text.strip())), relation, count)


@check
def num_paragraphs(text: str, *, relation: Relation, count: int) -> bool:
    """Number of paragraphs, separated by blank lines."""
    return _holds(len(_paragraphs(text)), relation, count)


@check
def num_divided_parts(text: str, *, divider: str, relation: Relation, count: int) -> bool:
    """Number of parts between dividers (*** for instance); a divider may open or close the text, two never
    meet."""
    parts = [part.strip() for part in text.split(divider)]
    return all(parts[1:-1]) and _holds(sum(map(bool, parts)), relation, count)


@check
def num_lines(text: str, *, relation: Relation, count: int) -> bool:
    """Number of lines that hold something."""
    return _holds(sum(bool(line.strip()) for line in text.splitlines()), relation, count)


@check
def num_characters(text: str, *, relation: Relation, count: int) -> bool:
    """Number of characters of the stripped response."""
    return _holds(len(text.strip()), relation, count)


@check
def num_bullets(text: str, *, relation: Relation, count: int) -> bool:
    """Number of bullet points."""
    return _holds(len(_BULLET.findall(text)), relation, count)


@check
def num_numbered_items(text: str, *, relation: Relation, count: int) -> bool:
    """Number of items of numbered lists."""
    return _holds(len(_NUMBERED.findall(text)), relation, count)


@check
def num_sections(text: str, *, relation: Relation, count: int, splitter: str = "") -> bool:
    """Number of markdown headings; with a splitter ("Section"), of places where it stands before a number."""
    marks = re.findall(rf"{re.escape(splitter)}\s?[0-9]", text, re.IGNORECASE) if splitter else None
    return _holds(len(_SECTION.findall(text) if marks is None else marks), relation, count)


@check
def num_highlights(text: str, *, relation: Relation, count: int) -> bool:
    """Number of passages in *stars*."""
    return _holds(len(_HIGHLIGHT.findall(text)), relation, count)


@check
def num_placeholders(text: str, *, relation: Relation, count: int) -> bool:
    """Number of placeholders in [square brackets]."""
    return _holds(len(_PLACEHOLDER.findall(text)), relation, count)


@check
def num_capital_words(text: str, *, relation: Relation, count: int) -> bool:
    """Number of words of two letters or more in capitals."""
    capitals = sum(word.isupper() and len(word) > 1 for word in _WORD.findall(text))
    return _holds(capitals, relation, count)


@check
def letter_frequency(text: str, *, letter: str, relation: Relation, count: int) -> bool:
    """How often a letter occurs, in either case."""
    return _holds(text.lower().count(letter.lower()), relation, count)


@check
def word_frequency(text: str, *, word: str, relation: Relation, count: int) -> bool:
    """How often a word or phrase occurs, as whole words in either case."""
    return _holds(len(_phrase(word).findall(text)), relation, count)


@check
def contains_words(text: str, *, words: list[str]) -> bool:
    """All the words occur, as whole words or phrases."""
    return all(_phrase(word).search(text) for word in words)


@check
def avoids_words(text: str, *, words: list[str]) -> bool:
    """None of the words occurs, and the response says something."""
    return bool(text.strip()) and not any(_phrase(word).search(text) for word in words)


@check
def starts_with(text: str, *, phrase: str) -> bool:
    """The response starts with the phrase, in either case."""
    return text.lstrip().lower().startswith(phrase.strip().lower())


@check
def ends_with(text: str, *, phrase: str) -> bool:
    """The response ends with the phrase, in either case; a quotation mark that closes the response may
    follow."""
    body, phrase = text.rstrip().lower(), phrase.strip().lower()
    return body.endswith(phrase) or body.removesuffix('"').rstrip().endswith(phrase)


@check
def all_lower_case(text: str) -> bool:
    """Letters, and no capitals."""
    return any(c.isalpha() for c in text) and text == text.lower()


@check
def all_upper_case(text: str) -> bool:
    """Letters, and no small ones."""
    return any(c.isalpha() for c in text) and text == text.upper()


@check
def no_commas(text: str) -> bool:
    """Something is said, without a comma."""
    return bool(text.strip()) and "," not in text


@check
def json_only(text: str) -> bool:
    """The response is one JSON object or list, in a code block or bare."""
    body = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if len(body) > 1_000_000 or body[:1] not in ("{", "["):
        return False
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


@check
def quoted(text: str) -> bool:
    """The whole response stands in double quotes."""
    body = text.strip()
    return len(body) > 2 and body[0] == '"' and body[-1] == '"'


@check
def has_title(text: str) -> bool:
    """A title in <<double angle brackets>>."""
    return re.search(r"<<[^<>\n]{1,200}>>", text) is not None


@check
def has_postscript(text: str, *, marker: str) -> bool:
    """A line that starts with the marker (P.S.), in either case, and goes on."""
    line = rf"^\s{{0,8}}{re.escape(marker)}[ \t]*\S"
    return re.search(line, text, re.MULTILINE | re.IGNORECASE) is not None


@check
def paragraph_starts_with(text: str, *, number: int, word: str, total: int = 0) -> bool:
    """Paragraph `number` (from 1) starts with the word; with `total`, there are so many paragraphs."""
    paragraphs = _paragraphs(text)
    if total and len(paragraphs) != total:
        return False
    return 1 <= number <= len(paragraphs) and _words(paragraphs[number - 1])[:1] == [word.lower()]


@check
def one_of(text: str, *, options: list[str]) -> bool:
    """The response is exactly one of the options."""
    return text.strip() in options


@check
def contains_one_of(text: str, *, options: list[str]) -> bool:
    """One of the options occurs, letter by letter."""
    return any(option in text for option in options)


@check
def two_different_responses(text: str) -> bool:
    """Two different responses, separated by ******."""
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@check
def language_letters(text: str, *, script: str) -> bool:
    """At least 90% of the letters belong to a script (latin, cyrillic, greek, ...: see `SCRIPTS`)."""
    letters = [ord(c) for c in text if c.isalpha()]
    ranges = SCRIPTS.get(script, ())
    inside = sum(any(low <= c <= high for low, high in ranges) for c in letters)
    return bool(letters) and inside >= 0.9 * len(letters)


SCRIPTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "latin": ((0x41, 0x24F), (0x1E00, 0x1EFF)),
    "cyrillic": ((0x400, 0x52F),),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F)),
    "han": ((0x4E00, 0x9FFF), (0x3400, 0x4DBF)),
    "hangul": ((0xAC00, 0xD7AF),),
    "kana": ((0x3040, 0x30FF),),
    "devanagari": ((0x900, 0x97F),),
    "bengali": ((0x980, 0x9FF),),
    "gurmukhi": ((0xA00, 0xA7F),),
    "gujarati": ((0xA80, 0xAFF),),
    "tamil": ((0xB80, 0xBFF),),
    "telugu": ((0xC00, 0xC7F),),
    "kannada": ((0xC80, 0xCFF),),
    "malayalam": ((0xD00, 0xD7F),),
    "thai": ((0xE00, 0xE7F),),
    "hebrew": ((0x590, 0x5FF),),
}


def _phrase(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE)
