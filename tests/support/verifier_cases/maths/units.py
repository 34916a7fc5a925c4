"""One quantity in several units, and letters and words that are not units."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

from tests.support.verifier_cases.case import Case, Generator
from tests.support.verifier_cases.maths.boxed import boxed

_FAMILIES = (
    {"mm": 1, "cm": 10, "m": 1000, "km": 10**6}, {"mg": 1, "g": 1000, "kg": 10**6},
    {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}, {"inches": 1, "feet": 12, "yards": 36},
    {"ml": 1, "liters": 1000}, {"cents": 1, "dollars": 100}, {"months": 1, "years": 12},
    {"ounces": 1, "pounds": 16},
)  # fmt: skip
_RATES = (
    ("km/h", "\\text{km per hour}"),
    ("m/s", "\\mathrm{m}\\,\\mathrm{s}^{-1}"),
    ("cm^2", "\\text{cm}^2"),
    ("m^3", "cubic meters"),
)
_NO_UNITS = (
    "y", "b", "t", "x", "k", "e", "i", "thousands", "dozen", "pairs", "squared", "or so", "m", "qq", "2",
)  # fmt: skip


def units(rng: random.Random) -> Iterator[Case]:
    """Truths with, without and with compound units; answers with none, equal, other and false units."""
    while True:
        number, family, other = rng.randint(2, 400), *rng.sample(_FAMILIES, 2)
        unit, second = rng.sample(sorted(family), 2)
        truth = _with(rng, number, unit)
        yield boxed(str(number), truth, True, "the unit left out")
        yield boxed(_with(rng, number, unit), truth, True, "the same unit")
        yield boxed(
            _with(rng, Fraction(number * family[unit], family[second]), second), truth, True, "converted"
        )
        yield boxed(_with(rng, number, second), truth, False, "another unit")
        yield boxed(_with(rng, number, rng.choice(sorted(other))), truth, False, "another kind of unit")
        yield boxed(_with(rng, number + 1, unit), truth, False, "another number")
        yield boxed(_with(rng, number, unit), str(number), True, "a unit where none is asked for")
        yield boxed(f"{number}{rng.choice(_NO_UNITS)}", str(number), False, "letters that are no unit")
        yield boxed(f"{number} {rng.choice(_NO_UNITS)}", str(number), False, "letters that are no unit")
        yield boxed(f"\\sqrt{{2}}{rng.choice('tymb')}", "\\sqrt{2}", False, "a variable behind a root")
        yield from _rates(rng, number)
        letter = rng.choice("mgsh")
        for text in (str(number), f"{number}{letter}", f"{number}\\text{{ {letter}}}"):
            yield boxed(text, f"{number} {letter}", True, "a plain letter of the ground truth")
        yield boxed(f"{number}^\\circ", str(number), True, "degrees")
        yield boxed(f"{number}", f"{number}^\\circ", True, "degrees left out")
        yield boxed(f"{number}^\\circ", f"\\frac{{{number + 1}\\pi}}{{180}}", False, "another angle")


def _rates(rng: random.Random, number: int) -> Iterator[Case]:
    plain, spelled = rng.choice(_RATES)
    yield boxed(f"{number} {spelled}" if "\\" not in spelled else f"{number}{spelled}",
                f"{number}\\text{{ {plain}}}", True, "a compound unit")  # fmt: skip
    yield boxed(f"{number}\\text{{ {plain}}}", str(number), True, "a compound unit where none is asked for")


def _with(rng: random.Random, number: int | Fraction, unit: str) -> str:
    text = str(number) if not isinstance(number, Fraction) or number.denominator == 1 else _fraction(number)
    wrapped = f"{text}\\text{{ {unit}}}"
    return rng.choice(
        (wrapped, f"{text}\\ \\mathrm{{{unit}}}", wrapped if len(unit) == 1 else f"{text} {unit}")
    )


def _fraction(number: Fraction) -> str:
    return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"


GENERATORS: dict[str, Generator] = {"maths: units": units}
