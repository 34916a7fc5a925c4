"""Numbers in scientific and other notations, and unevaluated integers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.verifier_cases.case import Case, Generator
from tests.support.verifier_cases.maths.boxed import boxed


def notations(rng: random.Random) -> Iterator[Case]:
    """Yield one number in two notations; and another exponent, digit or sign."""
    while True:
        digits, exponent = rng.randint(11, 9999), rng.choice([*range(-30, -3), *range(4, 40)])
        if digits % 10 == 0:
            continue
        truth = rng.choice(_notations(digits, exponent))
        for _ in range(2):
            yield boxed(rng.choice(_notations(digits, exponent)), truth, True, "another notation")
        wrong = rng.choice(
            [(digits, exponent + 1), (digits, exponent - 1), (digits + 1, exponent), (-digits, exponent)]
        )
        yield boxed(rng.choice(_notations(*wrong)), truth, False, "another number")
        yield boxed(f"{_mantissa(digits)[0]}e", truth, False, "Euler's number for an exponent")


def _mantissa(digits: int) -> tuple[str, int]:
    """1234 -> 1.234 and 3."""
    text = str(abs(digits))
    return ("-" if digits < 0 else "") + f"{text[0]}.{text[1:]}", len(text) - 1


def _notations(digits: int, exponent: int) -> list[str]:
    mantissa, places = _mantissa(digits)
    power = exponent + places
    texts = [f"{mantissa} {sign} 10^{{{power}}}" for sign in ("\\times", "\\cdot", "\u00d7")]
    texts += [f"{mantissa}e{power}", f"{mantissa}E{power:+03d}", f"{mantissa}\\cdot10^{{{power}}}"]
    if 0 <= exponent < 12:
        texts += [str(digits * 10**exponent), f"{digits * 10**exponent:,}"]
    return texts


def unevaluated(rng: random.Random) -> Iterator[Case]:
    """Yield an integer in its spellings, and expressions that still need evaluation."""
    while True:
        left, right = rng.randint(12, 99), rng.randint(12, 99)
        value, root = left * right, rng.choice([n for n in range(3, 30) if n != 10])
        for text in (str(value), f"{value:,}", f"{value}.0", f"${value}$", f"({value})", f"{value}_{{10}}"):
            yield boxed(text, str(value), True, "the integer")
        for text in (
            f"{left}\\cdot {right}",
            f"{left} \\times {right}",
            f"{left}*{right}",
            f"{left}({right})",
        ):
            yield boxed(text, str(value), False, "a product")
        yield boxed(f"{left}+{right}", str(left + right), False, "a sum")
        yield boxed(f"{left}-{right}", str(left - right), False, "a difference")
        yield boxed(f"\\frac{{{value}}}{{{left}}}", str(right), False, "a quotient")
        yield boxed(f"{value}/{left}", str(right), False, "a quotient")
        yield boxed(f"{root}^2", str(root**2), False, "a power")
        yield boxed(f"\\sqrt{{{root**2}}}", str(root), False, "a root")
        yield boxed(f"{root % 7 + 3}!", str(_factorial(root % 7 + 3)), False, "a factorial")
        yield boxed(f"{value:b}_2", str(value), False, "another base")


def _factorial(number: int) -> int:
    return number * _factorial(number - 1) if number else 1


GENERATORS: dict[str, Generator] = {
    "maths: notations of numbers": notations,
    "maths: unevaluated answers": unevaluated,
}
