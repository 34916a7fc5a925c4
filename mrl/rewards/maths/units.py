"""Read units after a number from a closed list with exact scales. Any other text is not a unit.

    "km/h" -> 5/18 m s^-1     "square feet" -> 0.09290304 m^2     "\\text{cm}^3" -> 10^-6 m^3     "y" -> None

Scales: the International System of Units (BIPM brochure, 9th edition) and the international yard, pound and
US gallon (NIST SP 811, appendix B), all exact.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from fractions import Fraction

from mrl.rewards.maths.counted_nouns import COUNTED, singular

Dimensions = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Unit of `scale * pi**pi` times the base units in `dimensions`."""

    scale: Fraction
    dimensions: Dimensions
    pi: int = 0

    def __mul__(self, other: Unit) -> Unit:
        exponents = dict(self.dimensions)
        for base, exponent in other.dimensions:
            exponents[base] = exponents.get(base, 0) + exponent
        dimensions = tuple(sorted((base, exponent) for base, exponent in exponents.items() if exponent))
        return Unit(self.scale * other.scale, dimensions, self.pi + other.pi)

    def __pow__(self, exponent: int) -> Unit:
        dimensions = tuple((base, power * exponent) for base, power in self.dimensions)
        return Unit(self.scale**exponent, dimensions, self.pi * exponent)


NONE = Unit(Fraction(1), ())
DEGREE = Unit(Fraction(1, 180), (("angle", 1),), pi=1)

_PREFIXES = {
    "k": 3, "h": 2, "d": -1, "c": -2, "m": -3, "\u00b5": -6, "\u03bc": -6, "n": -9, "M": 6, "G": 9, "T": 12,
    "kilo": 3, "hecto": 2, "deci": -1, "centi": -2, "milli": -3, "micro": -6, "nano": -9, "mega": 6,
    "giga": 9,
}  # fmt: skip
_SYMBOLS = {
    "m": ("1", "m1"), "g": ("1/1000", "kg1"), "s": ("1", "s1"), "L": ("1/1000", "m3"), "l": ("1/1000", "m3"),
    "N": ("1", "kg1 m1 s-2"), "J": ("1", "kg1 m2 s-2"), "W": ("1", "kg1 m2 s-3"), "Pa": ("1", "kg1 m-1 s-2"),
    "Hz": ("1", "s-1"), "A": ("1", "A1"), "V": ("1", "A-1 kg1 m2 s-3"), "K": ("1", "K1"),
    "mol": ("1", "mol1"), "C": ("1", "A1 s1"), "\u03a9": ("1", "A-2 kg1 m2 s-3"),
}  # fmt: skip
_PREFIXED_WORDS = {
    "meter": "m", "metre": "m", "gram": "g", "liter": "L", "litre": "L", "second": "s", "newton": "N",
    "joule": "J", "watt": "W", "pascal": "Pa", "hertz": "Hz", "ampere": "A", "volt": "V", "ohm": "\u03a9",
    "mole": "mol",
}  # fmt: skip
_OTHERS = {
    "in inch inches": ("127/5000", "m1"), "ft foot feet": ("381/1250", "m1"),
    "yd yard yards": ("1143/1250", "m1"), "mi mile miles": ("201168/125", "m1"), "sec secs": ("1", "s1"),
    "min mins minute minutes": ("60", "s1"), "h hr hrs hour hours": ("3600", "s1"),
    "day days": ("86400", "s1"), "week weeks": ("604800", "s1"), "month months": ("1", "month1"),
    "yr yrs year years": ("12", "month1"), "decade decades": ("120", "month1"),
    "century centuries": ("1200", "month1"), "oz ounce ounces": ("45359237/1600000000", "kg1"),
    "lb lbs pound pounds": ("45359237/100000000", "kg1"), "t tonne tonnes": ("1000", "kg1"),
    "ton tons": ("1", "ton1"), "ha hectare hectares": ("10000", "m2"),
    "acre acres": ("316160658/78125", "m2"), "cc": ("1/1000000", "m3"),
    "gal gallon gallons": ("473176473/125000000000", "m3"),
    "qt quart quarts": ("473176473/500000000000", "m3"), "pint pints": ("473176473/1000000000000", "m3"),
    "cup cups": ("473176473/2000000000000", "m3"),
    "tablespoon tablespoons tbsp": ("473176473/32000000000000", "m3"),
    "teaspoon teaspoons tsp": ("473176473/96000000000000", "m3"), "mph": ("1397/3125", "m1 s-1"),
    "kmh kmph kph": ("5/18", "m1 s-1"), "mps": ("1", "m1 s-1"), "fps": ("381/1250", "m1 s-1"),
    "knot knots": ("463/900", "m1 s-1"), "rpm": ("1/60", "s-1"), "cal": ("523/125", "kg1 m2 s-2"),
    "kcal": ("4184", "kg1 m2 s-2"), "kWh": ("3600000", "kg1 m2 s-2"),
    "rad rads radian radians": ("1", "angle1"), "kelvin kelvins": ("1", "K1"), "celsius": ("1", "celsius1"),
    "fahrenheit": ("1", "fahrenheit1"), "kgs": ("1", "kg1"), "cms": ("1/100", "m1"), "kms": ("1000", "m1"),
    "bit bits": ("1", "bit1"), "byte bytes": ("8", "bit1"), "dollar dollars usd $ bucks": ("1", "dollar1"),
    "cent cents \u00a2": ("1/100", "dollar1"), "euro euros eur \u20ac": ("1", "euro1"),
    "\u00a3 gbp": ("1", "sterling1"), "yen \u00a5": ("1", "yen1"),
    "rupee rupees rs inr \u20b9": ("1", "rupee1"), "yuan rmb": ("1", "yuan1"),
}  # fmt: skip

SINGLE_LETTERS = frozenset("mgshLNJWVAK")
"""One-letter symbols that are units without \\text{} if the ground truth is written so."""

_MAX_CHARS = 60
_WRAPPED = re.compile(r"\\(?:text|mathrm|textrm|mbox|operatorname|textup)\{([^{}]*)\}")
_SUPERSCRIPTS = str.maketrans("\u00b2\u00b3", "23")
_TOKEN = re.compile(
    r"(?P<word>[A-Za-z\u00b5\u03bc\u03a9$\u20ac\u00a2\u00a3\u00a5\u20b9]+)"
    r"|(?P<power>\^ ?\{? ?[+-]?[0-9]\}?|[\u00b2\u00b3])|(?P<over>/)"
    r"|(?P<times>\\cdot(?![a-zA-Z])|[*\u00b7])|[ .{}]"
)
_DEGREES = re.compile(
    r"(?:\^ ?\{? ?\\circ ?\}?|\u00b0|\\degree(?![a-z])|\\textdegree(?![a-z])|\\deg(?![a-z])) ?"
)
_DEGREE_WORDS = {"degree": DEGREE, "degrees": DEGREE, "deg": DEGREE}
_TEMPERATURES = {"C": "celsius", "F": "fahrenheit", "celsius": "celsius", "fahrenheit": "fahrenheit"}


def _unit(scale: str, dimensions: str) -> Unit:
    pairs = (re.fullmatch(r"([A-Za-z]+?)(-?[0-9])", part) for part in dimensions.split())
    return Unit(Fraction(scale), tuple(sorted((pair[1], int(pair[2])) for pair in pairs if pair)))


def _table() -> Iterator[tuple[str, Unit]]:
    for noun in COUNTED:
        yield noun, Unit(Fraction(1), ((singular(noun), 1),))
    for symbol, entry in _SYMBOLS.items():
        for prefix, power in _PREFIXES.items():
            if len(prefix) == 1:
                yield prefix + symbol, Unit(Fraction(10) ** power, ()) * _unit(*entry)
        yield symbol, _unit(*entry)
    for word, symbol in _PREFIXED_WORDS.items():
        for prefix, power in ((p, n) for p, n in [("", 0), *_PREFIXES.items()] if len(p) != 1):
            for form in (word, word + "s"):
                yield prefix + form, Unit(Fraction(10) ** power, ()) * _unit(*_SYMBOLS[symbol])
    for names, entry in _OTHERS.items():
        for name in names.split():
            yield name, _unit(*entry)
    yield from _DEGREE_WORDS.items()


UNITS = dict(_table())
"""Every known unit by name or symbol; symbols are case-sensitive, words are not."""


@functools.lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit | None:
    """Return the unit that `text` names; None if any part of it is not a known unit."""
    if len(text) > _MAX_CHARS:
        return None
    degrees = _DEGREES.match(text)
    if degrees:
        return _degrees(_unwrapped(text[degrees.end() :]))
    words = _unwrapped(text)
    temperature = re.fullmatch(r"(?:degrees?|deg) ([A-Za-z]+)", words)
    if temperature and (temperature[1] in _TEMPERATURES or temperature[1].lower() in _TEMPERATURES):
        return _degrees(temperature[1])
    return _product(words)


def _unwrapped(text: str) -> str:
    return " ".join(_WRAPPED.sub(r" \1 ", text).split())


def _degrees(scale: str) -> Unit | None:
    if not scale:
        return DEGREE
    name = _TEMPERATURES.get(scale) or _TEMPERATURES.get(scale.lower())
    return UNITS[name] if name else None


def _product(text: str) -> Unit | None:
    """Read a product of units with powers, "per" and "/"; every unit after a "/" is in the denominator."""
    unit, last = NONE, NONE
    side = power = 1
    position, words = 0, 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if not token:
            return None
        position = token.end()
        if token["word"]:
            word = token["word"]
            if word.lower() in ("square", "sq", "cubic", "cu") and position < len(text):
                power = 2 if word.lower().startswith("sq") else 3
            elif word.lower() == "per" and words:
                side = -1
            else:
                factor = UNITS.get(word) or (UNITS.get(word.lower()) if len(word) > 2 else None)
                if factor is None:
                    return None
                last, words = factor ** (side * power), words + 1
                unit, power = unit * last, 1
        elif token["power"]:
            if not words:
                return None
            exponent = int(re.sub(r"[\^{} ]", "", token["power"]).translate(_SUPERSCRIPTS))
            unit = unit * last ** (exponent - 1)
            last = NONE
        elif token["over"]:
            side = -1
    return unit if words and power == 1 else None


_TAIL = re.compile(
    r"(?:\^ ?\{? ?\\circ|\u00b0|\\degree|\\textdegree|\\deg(?![a-z])"
    r"|\\(?:text|mathrm|textrm|mbox|operatorname|textup) ?\{)"
)
_PLAIN_TAIL = re.compile(
    r"(?<=[0-9.\])} ])[A-Za-z\u00b5\u03bc\u03a9$\u20ac\u00a2\u00a3\u00a5\u20b9]"
    r"[A-Za-z\u00b5\u03bc\u03a9/^0-9{} .\u00b2\u00b3\u00b7*-]*$"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LEADING = re.compile(r"^([+-]?) ?(\\?\$|\u20ac|\u00a3|\u00a5|\u20b9|(?:Rs|USD|EUR)\.? ?)(?=[0-9.])")


def split_unit(text: str, *, single_letters: bool = False) -> tuple[str, Unit | None]:
    """Return the text without its unit, and the unit; the whole text and None if it has none.

    A unit is in \\text{}, after a degree sign, before the number (currencies), or in plain letters. Two or
    more plain letters are a unit after a number, and after any other expression only after a space. A single
    letter is one only if `single_letters` (the ground truth is written so), and never after another letter.
    """
    leading = _LEADING.match(text)
    if leading:
        return leading[1] + text[leading.end() :], read_unit(leading[2].strip("\\ ."))
    wrapped = _TAIL.search(text)
    if wrapped and wrapped.start():
        unit = read_unit(text[wrapped.start() :])
        if unit is not None:
            return text[: wrapped.start()].rstrip(" ~"), unit
    plain = _PLAIN_TAIL.search(text) if text[:1] not in "\\" or " " in text else None
    if not plain or not plain.start():
        return text, None
    return _plain(text, plain.start(), single_letters)


def _plain(text: str, start: int, single_letters: bool) -> tuple[str, Unit | None]:
    body, letters = text[:start], text[start:]
    spaced = body != body.rstrip()
    numeral = all(char in "0123456789.,+-/ " for char in body) or body.startswith("\\frac")
    short = [word for word in re.findall(r"[A-Za-z]+", letters) if len(word) == 1]
    if short and not re.search("/|per ", letters):
        after_a_letter = re.search("[A-Za-z]", _COMMAND.sub("", body))  # b h is a product
        if not single_letters or not set(short) <= SINGLE_LETTERS or after_a_letter:
            return text, None
    unit = read_unit(letters) if numeral or spaced else None
    return (body.rstrip(), unit) if unit is not None else (text, None)
