"""Decimals of irrational numbers, and numbers that differ by very little."""

from __future__ import annotations

import decimal
import random
from collections.abc import Iterator

from tests.support.verifier_cases.case import Case, Generator
from tests.support.verifier_cases.maths.boxed import boxed

_PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def decimals(rng: random.Random) -> Iterator[Case]:
    """Yield roots and multiples of pi, correctly rounded or not, bare and in brackets; cut fractions."""
    while True:
        text, value = _irrational(rng)
        significant = rng.randint(6, 20)
        rounded = _rounded(value, significant)
        for before, after in (("", ""), ("(", ", 1)"), ("\\{", ", 1\\}")):
            truth = f"{before}{text}{after}"
            yield boxed(f"{before}{rounded}{after}", truth, True, "rounded")
            yield boxed(f"{before}{_next(rounded)}{after}", truth, False, "the last digit is another")
            yield boxed(
                f"{before}{_rounded(value, rng.randint(2, 5))}{after}", truth, False, "too few digits"
            )
        yield from _close_numbers(rng, text)
        third = rng.choice((3, 7, 9, 11, 13))
        cut = _rounded(decimal.Decimal(1) / third, rng.randint(3, 15))
        yield boxed(cut, f"\\frac{{1}}{{{third}}}", False, "a fraction is no decimal")
        yield boxed(cut, f"\\sqrt{{\\frac{{1}}{{{third**2}}}}}", False, "a fraction under a root")


def _close_numbers(rng: random.Random, text: str) -> Iterator[Case]:
    """Yield differences that a threshold would miss."""
    tiny = f"10^{{-{rng.randint(7, 300)}}}"
    yield boxed(f"{text}+{tiny}", text, False, "a tiny difference")
    yield boxed(f"2\\cdot {tiny}", tiny, False, "twice a tiny number")
    yield boxed(f"{text}+{tiny}", f"{tiny}+{text}", True, "the same tiny summand")
    yield boxed("0", tiny, False, "zero for a tiny number")


def _irrational(rng: random.Random) -> tuple[str, decimal.Decimal]:
    with decimal.localcontext() as context:
        context.prec = 60
        number = rng.choice((2, 3, 5, 6, 7, 10, 11, 13, 15, 17, 19))
        factor = rng.randint(2, 40)
        return rng.choice(
            (
                (f"{factor}\\sqrt{{{number}}}", factor * decimal.Decimal(number).sqrt()),
                (f"\\sqrt{{{number}}}", decimal.Decimal(number).sqrt()),
                (f"{factor}\\pi", factor * _PI),
                (f"\\frac{{\\pi}}{{{factor}}}", _PI / factor),
            )
        )


def _rounded(value: decimal.Decimal, significant: int) -> str:
    with decimal.localcontext() as context:
        context.prec = significant
        return f"{+value:f}"


def _next(text: str) -> str:
    """Change the last digit, away from 0 and 9 so that nothing carries."""
    return text[:-1] + str((int(text[-1]) + 5) % 10)


GENERATORS: dict[str, Generator] = {"maths: decimals and close numbers": decimals}
