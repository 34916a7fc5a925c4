"""Read exact numbers from text: integers and rationals with their unit, without evaluating anything.

Every pattern is linear in the length of its (capped) input. Text that is not clearly one number gives None.

    "1,234" -> 1234     "1 234" -> 1234     "1.50" -> 3/2     "\\frac{3}{4}" -> 3/4     "007" -> 7 "4.5e33",
    "4.5 \\times 10^{33}" -> 45 * 10**32     "5 million" -> 5000000     "0.\\overline{3}" -> 1/3 "1,23" ->
    None      "1 1/2" -> None     "1/0" -> None     "1_000" -> None     "5 or 6" -> None     "5y" -> None
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from mrl.rewards.maths.layout import without_braces, without_layout
from mrl.rewards.maths.units import Unit, read_unit, split_unit

MAX_DIGITS = 300
"""Longer runs of digits are not plain numbers."""
MAX_CHARS = 2 * MAX_DIGITS
"""Longer texts are not plain numbers."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_TEN = r"10 ?\^ ?(?:\{ ?([+-]?[0-9]{1,3}) ?\}|\(([+-]?[0-9]{1,3})\)|([+-]?[0-9]{1,3}))"
_DECIMAL = re.compile(
    rf"([+-]?) ?({_INTEGER})?(?:\.([0-9]*)(?:\\overline ?\{{([0-9]+)\}})?)?"
    rf"(?:[eE]([+-]?[0-9]{{1,3}})| ?(?:\\times|\\cdot|[*\u00d7\u00b7x]) ?{_TEN})?"
)
_POWER_OF_TEN = re.compile(rf"([+-]?) ?{_TEN}")
_PART = r"(?:\{ ?([+-]?[0-9]+) ?\}| ?([0-9]))"
_FRACTION = re.compile(rf"([+-]?) ?\\frac ?{_PART} ?{_PART}")
_RATIO = re.compile(rf"([+-]?{_INTEGER}) ?/ ?({_INTEGER})")
_WORDS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORD = re.compile(rf" ?(?:\\text ?\{{ ?)?({'|'.join(_WORDS)})(?: ?\}})?(?![a-z])", re.IGNORECASE)
_SHORT_EXPONENT = re.compile(r"([+-]? ?[0-9]+[eE][+-])([0-9])")
_TIME = re.compile(r"([0-9]{1,2}(?::[0-9]{2})?) ?([AaPp])\.? ?[Mm]\.?")
_SPACES = str.maketrans(
    dict.fromkeys("\u00a0\u202f\u205f\u3000\t\n\r", " ")
    | dict.fromkeys(map(chr, range(0x2000, 0x200B)), " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", None)
    | dict.fromkeys("\u2212\u2013\u2010\u2011\u2012", "-")
)


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """Number with its unit."""

    value: Fraction
    unit: Unit | None = None
    is_quotient: bool = False
    """True if it is written as a quotient, so that an integer is not evaluated yet."""

    @property
    def is_integer(self) -> bool:
        """True if it is written as an integer: 84/2 is not."""
        return self.value.denominator == 1 and not self.is_quotient


def normalise_answer(text: str) -> str:
    """Return the text with plain spaces and signs, without LaTeX layout, for exact and symbolic readers."""
    text = without_layout(text.translate(_SPACES))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    for _ in range(3):  # dollars in braces in dollars
        text = without_braces(_without_dollars(text))
    text = text.strip("*").rstrip(".").strip()
    time = _TIME.fullmatch(text)
    return f"{time[1]} {time[2].lower()}m" if time else text


def _without_dollars(text: str) -> str:
    """Strip the delimiters of LaTeX's maths mode."""
    text = text.strip().rstrip(".").removesuffix("\\\\").strip()
    text = text.removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]").strip()
    while len(text) > 1 and text[0] == "$" and text[-1] == "$":
        text = text[1:-1].strip()
    return text


def as_numerals(answer: str, ground_truth: str) -> tuple[str, str]:
    """Return both tidy texts; if the ground truth is a number like 2e-1, neither is read as 2e - 1."""
    if not _SHORT_EXPONENT.fullmatch(ground_truth):
        return answer, ground_truth

    def padded(text: str) -> str:
        return _SHORT_EXPONENT.sub(r"\g<1>0\2", text) if _SHORT_EXPONENT.fullmatch(text) else text

    return padded(answer), padded(ground_truth)


def exact_number(text: str) -> Fraction | None:
    """Return the single number of a tidy text without its unit, or None."""
    quantity = exact_quantity(text)
    return quantity.value if quantity else None


def exact_quantity(text: str, *, single_letters: bool = False) -> Quantity | None:
    """Return the single number of a tidy text with its unit, or None.

    A percent sign is dropped. `single_letters` is that of `split_unit`.
    """
    if len(text) > MAX_CHARS:
        return None
    number = _plain(text)
    if number is not None:
        return number
    unsigned, has_percent = without_percent(text)
    if has_percent:
        return _plain(unsigned)
    word = _WORD.search(text)
    if word and word.end() < len(text):
        body, unit = text[: word.end()], read_unit(text[word.end() :])
    else:
        body, unit = split_unit(text, single_letters=single_letters)
    number = _plain(body) if unit is not None else None
    return dataclasses.replace(number, unit=unit) if number else None


def without_percent(text: str) -> tuple[str, bool]:
    """Return the text without a percent sign at its end, and True if there was one."""
    for ending in ("%", " percent", " pct", "\\text{percent}", "\\text{ percent}"):
        if text.endswith(ending):
            return text.removesuffix(ending).removesuffix("\\").strip(), True
    return text, False


def _plain(text: str) -> Quantity | None:
    if not text or len(text) > MAX_CHARS:
        return None
    word = _WORD.search(text) if text[-1:].isalpha() or text[-1] == "}" else None
    if word and word.end() == len(text):
        number = _plain(text[: word.start()])
        return Quantity(number.value * 10 ** _WORDS[word[1].lower()]) if number else None
    match = _DECIMAL.fullmatch(text)
    if match and (match[2] or match[3] or match[4]):
        return _decimal(match)
    match = _POWER_OF_TEN.fullmatch(text)
    if match:
        return Quantity(_signed(match[1], Fraction(10) ** int(match[2] or match[3] or match[4])))
    match = _FRACTION.fullmatch(text)
    if match:
        return _ratio(match[1], match[2] or match[3], match[4] or match[5])
    match = _RATIO.fullmatch(text)
    return _ratio("", match[1], match[2]) if match else None


def _decimal(match: re.Match[str]) -> Quantity | None:
    sign, whole, part, period, *exponents = match.groups()
    digits, part = _digits(whole or "0"), part or ""
    if max(len(digits), len(part), len(period or "")) > MAX_DIGITS:
        return None
    value = Fraction(int(digits + part), 10 ** len(part))
    if period:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(part))
    exponent = next((text for text in exponents if text), "")
    if exponents[0] and match[3] is None and exponent[0] in "+-" and len(exponent) == 2 and digits != "1":
        return None  # 2e-1 is 2e - 1; 1e-1, 2e1, 2e-01 and 2.0e-1 are numerals
    if exponent:
        value *= Fraction(10) ** int(exponent)
    return Quantity(_signed(sign, value))


def _ratio(sign: str, above: str, below: str) -> Quantity | None:
    numerator, denominator = _digits(above), _digits(below)
    if max(len(numerator), len(denominator)) > MAX_DIGITS or not int(denominator):
        return None
    return Quantity(_signed(sign, Fraction(int(numerator), int(denominator))), is_quotient=True)


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _digits(text: str) -> str:
    return text.replace(",", "").replace(" ", "")
