"""Equations and inequalities: multiplied, solved, turned round; and similar ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.verifier_cases.case import Case, Generator
from tests.support.verifier_cases.maths.boxed import boxed


def equations(rng: random.Random) -> Iterator[Case]:
    while True:
        slope, shift, factor = rng.randint(2, 9), rng.randint(1, 20), rng.randint(2, 5)
        line = f"y={slope}x+{shift}"
        for text in (
            f"{slope}x+{shift}=y",
            f"y-{slope}x={shift}",
            f"{factor}y={factor * slope}x+{factor * shift}",
        ):
            yield boxed(text, line, True, "the same line")
        yield boxed(f"x=\\frac{{y-{shift}}}{{{slope}}}", line, True, "solved for the other")
        for text in (f"y={slope}x", f"y={slope}x-{shift}", f"y={slope + 1}x+{shift}", f"x={slope}y+{shift}"):
            yield boxed(text, line, False, "another line")
        yield boxed(f"{slope}x+{shift}", line, False, "one side alone")
        yield from _solutions(rng)
        yield boxed(f"x={shift}", str(shift), True, "the variable named")
        yield boxed(f"x={shift + 1}", str(shift), False, "another value")


def _solutions(rng: random.Random) -> Iterator[Case]:
    first, second = rng.sample(range(1, 12), 2)
    square = f"x^2-{first + second}x+{first * second}=0"
    both = (f"x={first} \\text{{ or }} x={second}", f"x={second}, x={first}")
    for text in both:
        yield boxed(text, square, True, "its solutions")
        yield boxed(text, both[0], True, "the same solutions")
    yield boxed(f"(x-{first})(x-{second})=0", square, True, "in factors")
    yield boxed(f"x={first}", square, False, "one of its solutions")
    yield boxed(f"x^2-{first + second}x+{first * second + 1}=0", square, False, "another equation")
    yield boxed(f"x=\\pm {first}", f"x^2={first**2}", True, "both signs")
    yield boxed(f"x={first}", f"x^2={first**2}", False, "one sign")
    yield boxed(str(first), f"x={first}", True, "the value alone")
    yield boxed(str(second), f"x={first}", False, "another value")
    yield boxed(f"n={first}", f"x={first}", False, "another variable")
    yield boxed(f"x={first}", f"x^3={first**3}", True, "its one real solution")
    yield boxed(f"(x^2+{second})(x-{first})=0", f"x={first}", True, "a factor that is not zero")
    yield boxed(f"x^2+{first}=0", f"x^2+{second}=0", False, "none has real solutions")


def inequalities(rng: random.Random) -> Iterator[Case]:
    """Turned round, multiplied, as intervals; the other sign, an end more or less."""
    while True:
        low = rng.randint(-9, 9)
        high, factor = low + rng.randint(1, 9), rng.randint(2, 5)
        for text in (
            f"{low}<x",
            f"{factor}x>{factor * low}",
            f"x-({low})>0",
            f"-x<{-low}",
            f"x\\in({low},\\infty)",
        ):
            yield boxed(text, f"x>{low}", True, "the same half-line")
        for text in (f"x<{low}", f"x\\ge {low}", f"-x>{-low}", f"x>{high}", f"y>{low}", f"x={low}"):
            yield boxed(text, f"x>{low}", False, "another half-line")
        inside = f"{low}<x\\le {high}"
        for text in (f"{high}\\ge x>{low}", f"x \\in ({low}, {high}]", f"{low} < x \\leq {high}"):
            yield boxed(text, inside, True, "the same interval")
        for text in (
            f"{low}\\le x\\le {high}",
            f"{low}<x<{high}",
            f"x\\in[{low},{high}]",
            f"{low}<x\\le {high + 1}",
        ):
            yield boxed(text, inside, False, "another interval")
        outside = f"x<{low} \\text{{ or }} x>{high}"
        yield boxed(f"x\\in({high},\\infty)\\cup(-\\infty,{low})", outside, True, "two intervals")
        yield boxed(f"x>{high} or x<{low}", outside, True, "the other order")
        yield boxed(f"x<{high} \\text{{ or }} x>{low}", outside, False, "ends exchanged")


GENERATORS: dict[str, Generator] = {"maths: equations": equations, "maths: inequalities": inequalities}
