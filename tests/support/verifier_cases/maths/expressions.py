"""Expressions in equal forms (commuted, expanded, Unicode, complex), and close ones of other values."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.verifier_cases.case import Case, Generator
from tests.support.verifier_cases.maths.boxed import boxed


def expressions(rng: random.Random) -> Iterator[Case]:
    while True:
        a, b, c = rng.sample(range(2, 30), 3)
        letters = rng.sample("abcdmnpqrstuvwxyz", 3)
        x, y, z = letters
        yield from _letters(rng, letters, a)
        truth = f"{x}^2+{a + b}{x}+{a * b}"
        for text in (f"({x}+{a})({x}+{b})", f"{a * b}+{a + b}{x}+{x}^2", f"{x}({x}+{a + b})+{a * b}"):
            yield boxed(text, truth, True, "a polynomial")
        for text in (
            f"({x}+{a})({x}-{b})",
            f"{x}^2+{a + b}{x}+{a * b + 1}",
            f"({y}+{a})({y}+{b})",
            truth[:-1] + "x",
        ):
            yield boxed(text, truth, False, "another polynomial")
        yield from _roots(a, b, c)
        yield boxed(f"\\frac{{{x}^2-{a * a}}}{{{x}-{a}}}", f"{x}+{a}", True, "a quotient")
        yield boxed(f"{a}\\sin({x})\\cos {x}\\cdot 2", f"{a}\\sin 2{x}", True, "trigonometry")
        yield boxed(f"{a}\\sin^2 {x}", f"{a}-{a}\\cos^2({x})", True, "trigonometry")
        yield boxed(f"{a}\\sin {x}", f"{a}\\cos {x}", False, "another function")
        yield boxed(f"\\ln {a}+\\ln {b}", f"\\ln {a * b}", True, "logarithms")
        yield boxed(f"\\ln {a}\\cdot\\ln {b}", f"\\ln {a * b}", False, "logarithms")
        yield boxed(f"{x}^{{{z}+1}}", f"{x}\\cdot {x}^{z}", True, "powers")
        yield boxed(f"{a}\u03c0", f"{a}\\pi", True, "Unicode")
        yield boxed(f"\u221a{a}", f"\\sqrt{{{a}}}", True, "Unicode")
        yield boxed(f"{a}\\frac{{1}}{{{b}}}", f"\\frac{{{a * b + 1}}}{{{b}}}", True, "a mixed number")
        yield boxed(f"{a}\\frac{{1}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}", False, "a mixed number is no product")


def _letters(rng: random.Random, letters: list[str], number: int) -> Iterator[Case]:
    x, y, _ = letters
    turned = rng.sample(letters, 3)
    yield boxed("".join(turned), "".join(letters), True, "letters in another order")
    # Letters of no unit: 26m^2yd is a volume in one order and a product in another.
    yield boxed(f"{number}zx^2w", f"{number}x^2wz", True, "factors in another order")
    yield boxed(f"{number}{y}", f"{number}{x}", False, "another letter")
    yield boxed(f"{x}+{y}", f"{x}{y}", False, "a sum for a product")
    yield boxed(f"{x}_{{1}}+{x}_2", f"{x}_2+{x}_1", True, "indices")
    yield boxed(f"{x}_1+{x}_1", f"{x}_2+{x}_1", False, "indices")


def _roots(a: int, b: int, c: int) -> Iterator[Case]:
    yield boxed(f"\\sqrt[3]{{{a}}}", f"{a}^{{1/3}}", True, "a cube root")
    yield boxed(f"{a}^{{\\frac13}}", f"\\sqrt[3]{{{a}}}", True, "a cube root")
    yield boxed(f"\\sqrt{{{a * a * b}}}", f"{a}\\sqrt{{{b}}}", True, "a factor before the root")
    yield boxed(f"{a}\\sqrt{{{b}}}+1", f"\\sqrt{{{a * a * b}}}", False, "one more")
    yield boxed(f"\\frac{{{a}}}{{\\sqrt{{{b}}}}}", f"\\frac{{{a}\\sqrt{{{b}}}}}{{{b}}}", True, "a root below")
    yield boxed(f"\\frac {a % 9 + 1} {b % 9 + 1}", f"\\frac{{{a % 9 + 1}}}{{{b % 9 + 1}}}".replace("{}", ""),
                True, "a fraction without braces")  # fmt: skip
    yield boxed(f"\\sqrt{{{a}}}+\\sqrt{{{b}}}", f"\\sqrt{{{a + b}}}", False, "roots are not added so")
    yield boxed(f"\\sqrt{{{a + b}+2\\sqrt{{{a * b}}}}}", f"\\sqrt{{{b}}}+\\sqrt{{{a}}}", True, "nested roots")
    yield boxed(f"{c}^{{-1}}", f"\\frac{{1}}{{{c}}}", True, "a negative power")


def complex_numbers(rng: random.Random) -> Iterator[Case]:
    while True:
        a, b = rng.randint(1, 20), rng.randint(2, 20)
        truth = f"{a}+{b}i"
        for text in (f"{b}i+{a}", f"{a} + i{b}", f"{a}-(-{b}i)", f"i({b}-{a}i)", f"{a}+{b}\\mathrm{{i}}"):
            yield boxed(text, truth, True, "the same number")
        for text in (f"{a}-{b}i", f"{b}+{a + 30}i", f"{a + b}", f"{a}+{b}", f"{a}+{b}j", f"-{a}+{b}i"):
            yield boxed(text, truth, False, "another number")
        yield boxed(f"\\sqrt{{-{b * b}}}", f"{b}i", True, "a root of a negative number")
        yield boxed(f"{a}-{a}i^2", f"{2 * a}+0i", True, "i squared is -1")


GENERATORS: dict[str, Generator] = {
    "maths: expressions": expressions,
    "maths: complex numbers": complex_numbers,
}
