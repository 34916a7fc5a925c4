"""Checks of single instructions: pure functions of the visible response and of arguments in plain text, as
`parse_checks` makes them. They take time linear in the response's length.

Register a check with `@register_check`; its keyword-only arguments are its schema.
"""

from __future__ import annotations

import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_type_hints

from mrl.rewards.instructions.plain_text import VisibleResponse, prose

CHECKS: Mapping[str, Callable[..., bool]] = {}
"""Filled below, at import only."""

Relation = Literal["at_least", "at_most", "exactly", "around"]

UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
"""Character class of scripts without spaces between words (Thai, Lao, Tibetan, Burmese, Khmer, kana, Han)."""
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Kana and Han: each character counts as a word, as in word processors."""
_LETTER = rf"[^\W_{_SIGNS}]"
_WORD = re.compile(rf"[{_SIGNS}]|(?:(?<!{_LETTER}){_LETTER}')?{_LETTER}+(?:'{_LETTER}{{1,2}}(?!{_LETTER}))?")
"""An apostrophe joins one letter before it or up to two after it (d'accord, don't); hyphens separate words,
as IFEval counts."""
_SENTENCE_END = re.compile(r"[.!?]+(?=[\"')\]]{0,3}(?:\s|$))|[\u3002\u0964\u061f]+|(?<=[^\x00-\u02ff])[!?]+")
_BULLET = re.compile(r"^[ \t]{0,8}[*\-+][ \t]+(?![*\-+ \t]*$)\S", re.MULTILINE)
_NUMBERED = re.compile(r"^[ \t]{0,8}[0-9]{1,3}[.)][ \t]+\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^*\n]{1,200})\*\*|(?<!\*)\*([^*\s][^*\n]{0,200})\*(?!\*)")
_PLACEHOLDER = re.compile(r"\[([^\[\]\n]{1,80})\]")
_TITLE = re.compile(r"<<([^<>\n]{1,200})>>")
_JSON_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*)```", re.DOTALL | re.IGNORECASE)
_SECTION = re.compile(r"^#{1,6}[ \t]+\S", re.MULTILINE)
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")
_COMMAS = re.compile(
    "[,\u201a\u055d\u060c\u07f8\u1363\u1802\u1808\u2e32\u2e34\u2e41\u2e49\u2e4c"
    "\u3001\ua4fe\ua60d\ua6f5\ufe45]"
)
"""Commas of all scripts, and the quotation mark that looks like one."""


def register_check(function: Callable[..., bool]) -> Callable[..., bool]:
    """Register a check under its function's name."""
    CHECKS[function.__name__] = function  # type: ignore[index]
    return function


def arguments_error(name: str, arguments: Mapping[str, Any]) -> str:
    """Return what is wrong with a check's name or arguments; empty if nothing is."""
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
    invalid = [n for n, value in arguments.items() if not _fits(value, hints[n])]
    return f"check {name!r}: arguments with an invalid type or value: {invalid}" if invalid else ""


def _fits(value: Any, hint: Any) -> bool:
    if hint == Relation:
        return value in get_args(Relation)
    if hint is int:
        return type(value) is int and value >= 0
    if hint is str:
        return isinstance(value, str) and bool(value)
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value)


def _holds(count: int, relation: Relation, target: int) -> bool:
    """Compare a count; "around" allows a difference of a tenth of the target, and at least 1."""
    if relation == "exactly":
        return count == target
    if relation == "around":
        return abs(count - target) <= max(1, round(target / 10))
    return count >= target if relation == "at_least" else count <= target


def _has_content(text: str) -> bool:
    return _LETTER_OR_DIGIT.search(text) is not None


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _paragraphs(text: str) -> list[str]:
    return [
        part.strip() for part in re.split(r"\n[ \t]*\n|^\*{3}$", text, flags=re.MULTILINE) if part.strip()
    ]


@register_check
def num_words(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of words."""
    return _holds(len(_words(response.prose)), relation, count)


@register_check
def num_sentences(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of sentences: parts with a letter or digit between ends of sentences."""
    return _holds(sum(map(_has_content, _SENTENCE_END.split(response.prose))), relation, count)


@register_check
def num_paragraphs(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of paragraphs, which blank lines or `***` lines separate."""
    return _holds(len(_paragraphs(response.text)), relation, count)


@register_check
def num_divided_parts(response: VisibleResponse, *, divider: str, relation: Relation, count: int) -> bool:
    """Check the number of parts between dividers (such as ***). A divider may open or close the text; no part
    between two dividers may be empty."""
    parts = [part.strip() for part in response.text.split(divider)]
    return all(parts[1:-1]) and _holds(sum(map(bool, parts)), relation, count)


@register_check
def num_lines(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of lines that are not blank."""
    return _holds(sum(bool(line.strip()) for line in response.text.splitlines()), relation, count)


@register_check
def num_characters(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of visible characters; a letter with its marks is one, and so is a run of spaces."""
    visible = sum(not unicodedata.combining(char) for char in " ".join(response.text.split()))
    return _holds(visible, relation, count)


@register_check
def num_bullets(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of bullet points."""
    return _holds(len(_BULLET.findall(response.text)), relation, count)


@register_check
def num_numbered_items(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of items of numbered lists."""
    return _holds(len(_NUMBERED.findall(response.text)), relation, count)


@register_check
def num_sections(response: VisibleResponse, *, relation: Relation, count: int, splitter: str = "") -> bool:
    """Check the number of markdown headings; with a splitter ("Section"), of splitters before a number."""
    mark = re.compile(rf"{re.escape(splitter)}\s?[0-9]", re.IGNORECASE) if splitter else _SECTION
    return _holds(len(mark.findall(response.text)), relation, count)


@register_check
def num_highlights(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of non-empty passages in *stars*."""
    passages = map("".join, _HIGHLIGHT.findall(response.text))
    return _holds(sum(map(_has_content, passages)), relation, count)


@register_check
def num_placeholders(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of non-empty placeholders in [square brackets]."""
    return _holds(sum(map(_has_content, _PLACEHOLDER.findall(response.text))), relation, count)


@register_check
def num_capital_words(response: VisibleResponse, *, relation: Relation, count: int) -> bool:
    """Check the number of words of two or more letters in capitals."""
    capitals = sum(word.isupper() and len(word) > 1 for word in _WORD.findall(response.prose))
    return _holds(capitals, relation, count)


@register_check
def letter_frequency(response: VisibleResponse, *, letter: str, relation: Relation, count: int) -> bool:
    """Check how often a letter occurs, in either case."""
    return _holds(response.text.lower().count(letter.lower()), relation, count)


@register_check
def word_frequency(response: VisibleResponse, *, word: str, relation: Relation, count: int) -> bool:
    """Check how often a word or phrase occurs, as whole words in either case."""
    return _holds(len(_phrase(word).findall(response.prose)), relation, count)


@register_check
def contains_words(response: VisibleResponse, *, words: list[str]) -> bool:
    """Check that all the words or phrases occur, as whole words."""
    return all(_phrase(word).search(response.prose) for word in words)


@register_check
def avoids_words(response: VisibleResponse, *, words: list[str]) -> bool:
    """Check that none of the words occurs and the response is not empty."""
    return bool(response.text) and not any(_phrase(word).search(response.prose) for word in words)


@register_check
def starts_with(response: VisibleResponse, *, phrase: str) -> bool:
    """Check that the response starts with the phrase, in either case."""
    return _folded(response.prose).startswith(_folded(prose(phrase)))


@register_check
def ends_with(response: VisibleResponse, *, phrase: str) -> bool:
    """Check that the response ends with the phrase, in either case; a closing quotation mark may follow."""
    body, phrase = _folded(response.prose), _folded(prose(phrase))
    return body.endswith(phrase) or body.removesuffix('"').rstrip().endswith(phrase)


@register_check
def all_lower_case(response: VisibleResponse) -> bool:
    """Check that the response has lower-case letters and no capitals."""
    return response.text.islower()


@register_check
def all_upper_case(response: VisibleResponse) -> bool:
    """Check that the response has capitals and no lower-case letters."""
    return response.text.isupper()


@register_check
def no_commas(response: VisibleResponse) -> bool:
    """Check that the response is not empty and has no comma."""
    return bool(response.text) and not _COMMAS.search(response.text)


@register_check
def json_only(response: VisibleResponse) -> bool:
    """Check that the response is one JSON object or list (RFC 8259, no NaN or Infinity), bare or fenced."""
    body = response.written.strip()
    if block := _JSON_BLOCK.fullmatch(body):
        body = block[1].strip()
    if len(body) > 1_000_000 or body[:1] not in ("{", "["):
        return False
    try:
        json.loads(body, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    return True


def _no_json(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


@register_check
def quoted(response: VisibleResponse) -> bool:
    """Check that the whole response is in double quotes."""
    body = response.text
    return _has_content(body) and body[0] == '"' and body[-1] == '"'


@register_check
def has_title(response: VisibleResponse) -> bool:
    """Check for a title in <<double angle brackets>>."""
    return any(map(_has_content, _TITLE.findall(response.text)))


@register_check
def has_postscript(response: VisibleResponse, *, marker: str) -> bool:
    """Check for a line that starts with the marker (P.S.), in either case, and continues with text."""
    line = re.compile(rf"^[ \t]{{0,8}}{re.escape(marker)}(.*)", re.MULTILINE | re.IGNORECASE)
    return any(map(_has_content, line.findall(response.prose)))


@register_check
def paragraph_starts_with(response: VisibleResponse, *, number: int, word: str, total: int = 0) -> bool:
    """Check that paragraph `number` (from 1) starts with the word; `total`, if set, is their exact number."""
    paragraphs = _paragraphs(response.text)
    if total and len(paragraphs) != total:
        return False
    words = _words(word)
    return 1 <= number <= len(paragraphs) and _words(prose(paragraphs[number - 1]))[: len(words)] == words


@register_check
def one_of(response: VisibleResponse, *, options: list[str]) -> bool:
    """Check that the response is exactly one of the options."""
    return response.prose in options


@register_check
def contains_one_of(response: VisibleResponse, *, options: list[str]) -> bool:
    """Check that one of the options occurs, in the same case."""
    return any(option in response.prose for option in options)


@register_check
def two_different_responses(response: VisibleResponse) -> bool:
    """Check for two different responses, separated by ******."""
    parts = [" ".join(prose(part).split()) for part in response.text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@register_check
def language_letters(response: VisibleResponse, *, script: str) -> bool:
    """Check that at least 90 % of the letters belong to a script of `SCRIPTS` (latin, cyrillic, ...)."""
    letters = [ord(c) for c in response.text if c.isalpha()]
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
    spaced = r"\s+".join(map(re.escape, words.split()))
    return re.compile(rf"(?<![^\W_]){spaced}(?![^\W_])", re.IGNORECASE)


def _folded(text: str) -> str:
    return " ".join(text.lower().split())
