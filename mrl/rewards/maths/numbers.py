"""Exact numbers in text: integers and rationals, without any parser that evaluates.

Every pattern is linear in the length of its (capped) input. What is not plainly one number is None, never a
guess.

    "1,234" -> 1234     "1 234" -> 1234     "1.50" -> 3/2     "\\frac{3}{4}" -> 3/4     "007" -> 7
    "1,23" -> None      "1 1/2" -> None     "1/0" -> None     "1_000" -> None           "5 or 6" -> None
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 300
"""Longer digit runs are no plain numbers."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(rf"([+-]?)({_INTEGER})?(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{{1,3}}))?")
_FRACTION = re.compile(r"([+-]?)\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\}")
_SHORT_FRACTION = re.compile(r"([+-]?)\\frac([0-9])([0-9])")
_RATIO = re.compile(rf"([+-]?{_INTEGER}) ?/ ?({_INTEGER})")
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|textrm|mbox)\{ ?([A-Za-z][A-Za-z .]{0,24})\}|([A-Za-z][A-Za-z .]{0,24}))"
)
_UNIT_START = re.compile(r"\\(?:text|mathrm|textrm|mbox)\{|[A-Za-z]")
_LEADING_CURRENCY = re.compile(r"^([+-]?) ?(?:\\?\$|\u20ac|\u00a3)")
_NO_UNITS = frozenset(
    [
        "or",
        "and",
        "not",
        "to",
        "of",
        "e",
        "i",
        "pi",
        "x",
        "about",
        "between",
        "hundred",
        "thousand",
        "million",
        "billion",
        "trillion",
        "dozen",
        "half",
        "third",
        "quarter",
        "percent",
        "pct",
        "thirds",
        "halves",
        "quarters",
        "squared",
        "cubed",
        "th",
        "k",
        "m",
        "bn",
        "mod",
        "times",
        "plus",
        "minus",
        "over",
        "per",
        "if",
        "where",
        "undefined",
    ]
)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!")
_LATEX_SPACE = re.compile(r"(?<!\\)\\[,;: ]|~|\\quad(?![A-Za-z])")
_SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u2212": "-", "\t": " ", "\n": " "})


def tidy(text: str) -> str:
    """Plain spacing and signs, without LaTeX layout: what both exact and symbolic readers start from."""
    text = text.translate(_SPACES)
    text = _LAYOUT.sub("", text)
    text = _LATEX_SPACE.sub(" ", text)
    text = text.replace("{,}", ",").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.strip().rstrip(".").strip()
    text = text.removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]").strip()
    while len(text) > 1 and text[0] == "$" and text[-1] == "$":
        text = text[1:-1].strip()
    return text.strip("*").rstrip(".").strip()


def exact_number(text: str, *, percent: str = "ignore") -> Fraction | None:
    """The one number a tidy text states, or None.

    `percent` is MathsRules.percent: a sign is dropped ("ignore"), divides by 100 ("value") or is no number
    ("wrong").
    """
    text = _LEADING_CURRENCY.sub(r"\1", text, count=1).strip()
    body = text.removesuffix("%").removesuffix("\\").strip()
    has_percent = body != text and text.endswith("%")
    if has_percent and percent == "wrong":
        return None
    value = _plain(body)
    if value is None and not has_percent:
        value = _plain(_without_unit(body))
    if value is not None and has_percent and percent == "value":
        return value / 100
    return value


def _plain(text: str) -> Fraction | None:
    if not text or len(text) > 2 * MAX_DIGITS:
        return None
    match = _DECIMAL.fullmatch(text)
    if match and (match[2] or match[3]):
        return _decimal(match)
    match = _FRACTION.fullmatch(text) or _SHORT_FRACTION.fullmatch(text)
    if match:
        return _ratio(f"{match[1]}{match[2]}".replace("--", "").replace("+", ""), match[3])
    match = _RATIO.fullmatch(text)
    return _ratio(match[1], match[2]) if match else None


def _decimal(match: re.Match[str]) -> Fraction | None:
    sign, whole, part, exponent = match.groups()
    digits = _digits(whole or "0")
    if len(digits) > MAX_DIGITS or len(part or "") > MAX_DIGITS:
        return None
    value = Fraction(int(digits + (part or "")), 10 ** len(part or ""))
    if exponent:
        value *= Fraction(10) ** int(exponent)
    return -value if sign == "-" else value


def _ratio(above: str, below: str) -> Fraction | None:
    numerator, denominator = _digits(above), _digits(below)
    if max(len(numerator), len(denominator)) > MAX_DIGITS or not int(denominator):
        return None
    return Fraction(int(numerator), int(denominator))


def _digits(text: str) -> str:
    return text.replace(",", "").replace(" ", "")


def _without_unit(text: str) -> str:
    """A number followed by one unit in letters; words that change the value are no units."""
    opening = _UNIT_START.search(text)
    start = opening.start() if opening else -1
    if start <= 0:
        return text
    match = _UNIT.fullmatch(text[start:].strip())
    if not match:
        return text
    words = (match[1] or match[2]).lower().replace(".", " ").split()
    if len(words) > 3 or any(word in _NO_UNITS for word in words):
        return text
    return text[:start].strip()
