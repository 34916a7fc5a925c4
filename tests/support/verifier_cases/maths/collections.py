"""Several things at once: lists, sets, tuples, intervals, matrices; and numbers in a base."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.verifier_cases.case import Case, Generator
from tests.support.verifier_cases.maths.boxed import boxed


def several(rng: random.Random) -> Iterator[Case]:
    """Order counts in tuples, repetitions in sets and lists, ends in intervals, places in matrices."""
    while True:
        items = rng.sample(range(-20, 60), rng.randint(3, 5))
        turned = items[1:] + items[:1]
        repeated = [*items, items[0]]
        for opening, closing in (("\\{", "\\}"), ("", "")):
            truth = _joined(items, opening, closing)
            yield boxed(_joined(turned, opening, closing), truth, True, "another order in a set or list")
            yield boxed(_joined(repeated, opening, closing), truth, False, "one more time")
            yield boxed(truth, _joined(repeated, opening, closing), False, "one time less")
            yield boxed(
                _joined([*items, items[1]], opening, closing),
                _joined(repeated, opening, closing),
                False,
                "another twice",
            )
            yield boxed(_joined(items[1:], opening, closing), truth, False, "one is missing")
        for opening, closing in (("(", ")"), ("[", "]")):
            truth = _joined(items, opening, closing)
            yield boxed(_joined(items, opening, closing, ","), truth, True, "the same tuple")
            yield boxed(_joined(turned, opening, closing), truth, False, "another order in a tuple")
        yield from _nested(items)
        yield from _intervals(rng)
        yield from _matrices(items)


def _joined(items: list[int], opening: str = "", closing: str = "", between: str = ", ") -> str:
    return opening + between.join(map(str, items)) + closing


def _nested(items: list[int]) -> Iterator[Case]:
    a, b, c = items[:3]
    truth = f"\\{{\\{{{a},{b}\\}},\\{{{c}\\}}\\}}"
    yield boxed(f"\\{{\\{{{c}\\}},\\{{{b},{a}\\}}\\}}", truth, True, "the same set of sets")
    yield boxed(f"\\{{\\{{{a},{c}\\}},\\{{{b}\\}}\\}}", truth, False, "another set of sets")
    yield boxed(f"\\{{{a},{b},{c}\\}}", truth, False, "without the inner sets")


def _intervals(rng: random.Random) -> Iterator[Case]:
    low = rng.randint(-20, 20)
    high = low + rng.randint(1, 9)
    brackets = [(o, c) for o in "([" for c in ")]"]
    (opening, closing), other = rng.sample(brackets, 2)
    truth = f"{opening}{low}, {high}{closing}"
    yield boxed(f"\\left{opening}{low},{high}\\right{closing}", truth, True, "the same interval")
    yield boxed(f"{other[0]}{low}, {high}{other[1]}", truth, False, "other ends")
    yield boxed(f"{opening}{high}, {low}{closing}", truth, False, "ends exchanged")
    both = f"(-\\infty, {low}]\\cup[{high}, \\infty)"
    yield boxed(f"[{high},\\infty) \\cup (-\\infty,{low}]", both, True, "the same union")
    yield boxed(f"(-\\infty,{low}) \\cup [{high},\\infty)", both, False, "another union")


def _matrices(items: list[int]) -> Iterator[Case]:
    a, b, c = items[:3]
    for left, right, label in (("p", "b", "other brackets"), ("b", "p", "other brackets")):
        truth = f"\\begin{{{left}matrix}} {a} & {b} \\\\ {c} & {a} \\end{{{left}matrix}}"
        yield boxed(f"\\begin{{{right}matrix}}{a}&{b}\\\\{c}&{a}\\end{{{right}matrix}}", truth, True, label)
        yield boxed(
            f"\\begin{{{right}matrix}}{a}&{c}\\\\{b}&{a}\\end{{{right}matrix}}", truth, False, "transposed"
        )
        yield boxed(
            f"\\begin{{{right}matrix}}{a}\\\\{b}\\end{{{right}matrix}}", truth, False, "another shape"
        )


def bases(rng: random.Random) -> Iterator[Case]:
    """Yield numbers in a base: digits with and without the base, the plain number, and other bases."""
    while True:
        number, base = rng.randint(20, 400), rng.choice((2, 3, 5, 7, 8))
        digits, truth = _digits(number, base), f"{_digits(number, base)}_{{{base}}}"
        for text in (digits, f"{digits}_{base}", f"{digits}_{{{base}}}"):
            yield boxed(text, truth, True, "the digits")
        other = rng.choice([b for b in (2, 3, 5, 7, 8) if b != base])
        yield boxed(f"{_digits(number, other)}_{{{other}}}", truth, False, "another base")
        yield boxed(str(number), truth, False, "the number in ten")
        yield boxed(f"{_digits(number + 1, base)}_{{{base}}}", truth, False, "another number")


def _digits(number: int, base: int) -> str:
    return (_digits(number // base, base) if number >= base else "") + str(number % base)


GENERATORS: dict[str, Generator] = {
    "maths: lists, sets, intervals, matrices": several,
    "maths: number bases": bases,
}
