"""Test whether two expressions are the same number, or the same function of their variables.

Constants are compared exactly if both are rational, else with so many digits that two different ones of their
size differ. Functions are compared at random rational points: exactly if both are rational functions (two
different ones of degree d agree at a point with probability below d / 2**40), else numerically. An incorrect
answer ends at the first point, so it costs no more than a correct one.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from mrl.rewards.maths.expressions import Call, Constant, Number, Tree, symbols, walk
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.values import Digits, NoValue, exact_value

POINTS = 5
"""Number of points at which two functions must agree."""
_SIZES = [
    Fraction(n, 10)
    for n in (4, 10, 9, 20, 4, 80, 10, 20, 4, 10, 600, 11, 1, 5000, 25, 10, 4, 40000, 0, 0, 0, 0, 0)
]
"""Approximate size of the coordinates, one entry per point; 0 means small natural numbers."""
MIN_SIGNIFICANT = 6
"""Minimum number of significant digits of a rounded irrational number."""

MAX_DIGITS = 25_000
"""Two numbers that would need more digits to compare count as different."""

Point = dict[str, Fraction]


def same_scalar(answer: Tree, ground_truth: Tree, rules: MathsRules) -> bool:
    """Return True if an answer has the ground truth's value; False if the ground truth has none."""
    names = symbols(ground_truth)
    if symbols(answer) - names:
        return False
    if not names:
        return _same_constant(answer, ground_truth, rules)
    natural = _counted(answer) | _counted(ground_truth)
    verdicts = (_same_at(answer, ground_truth, point) for point in points(sorted(names), natural))
    decided = list(itertools.islice(_until_false(v for v in verdicts if v is not None), POINTS))
    return bool(decided) and all(decided)


def has_value(tree: Tree) -> bool:
    """Return True if the tree has a value at some point, so that an answer can equal it."""
    return any(_same_at(tree, tree, point) for point in points(sorted(symbols(tree)), _counted(tree)))


def points(names: list[str], natural: frozenset[str] | set[str] = frozenset()) -> Iterator[Point]:
    """Yield random rational points, always the same ones, small ones of both signs first. The variables in
    `natural` have small natural numbers."""
    numbers = random.Random("points")
    for size in _SIZES if names else (1,):
        yield {n: _coordinate(numbers, 0 if n in natural else size) for n in names}


def _coordinate(numbers: random.Random, size: Fraction | int) -> Fraction:
    if not size:
        return Fraction(numbers.randint(2, 40))
    value = size * Fraction(numbers.randint(1 << 38, 1 << 40), 1 << 39)
    return value if size > 50 or numbers.random() < 0.6 else -value


def _counted(tree: Tree) -> set[str]:
    """Return the variables that must be natural numbers: in n!, in binomials, and in (-1)^n."""
    names: set[str] = set()
    for node in walk(tree):
        if not isinstance(node, Call):
            continue
        if node.name in ("!", "binom"):
            names |= symbols(node)
        elif node.name == "^" and (base := _rational(node.arguments[0])) is not None and base < 0:
            names |= symbols(node.arguments[1])
    return names


def _until_false(verdicts: Iterator[bool]) -> Iterator[bool]:
    for verdict in verdicts:
        yield verdict
        if not verdict:
            return


def _same_at(answer: Tree, ground_truth: Tree, point: Point) -> bool | None:
    """Return True if both agree at a point; None if the ground truth has no value there, or a complex one
    without containing i."""
    with contextlib.suppress(NoValue):
        return bool(exact_value(answer, point) == exact_value(ground_truth, point))
    try:
        value = Digits(30).value(ground_truth, point)
    except NoValue:
        return None
    if point and value.imag and not any(node == Constant("i") for node in walk(ground_truth)):
        return None
    return _close(answer, ground_truth, point)


def _close(answer: Tree, ground_truth: Tree, point: Point) -> bool:
    """Return True if two values are the same number. Few digits decide if they are far apart; else the number
    of digits follows the size of the expressions, so that equal digits mean equal values (see `Digits`)."""
    size = len(list(walk(answer))) + len(list(walk(ground_truth)))
    digits = 30
    try:
        while True:
            work = Digits(digits)
            left, right = work.value(answer, point), work.value(ground_truth, point)
            if not (work.context.isfinite(left) and work.context.isfinite(right)):
                return bool(left == right)
            distance = abs(left - right)
            if distance > work.context.mpf(10) ** (work.reach + 10 - digits):
                return False
            needed = 40 + (1 if point else 4) * (size + int(work.reach))
            if digits >= needed:
                return True
            if needed > MAX_DIGITS:
                return False
            digits = needed
    except NoValue:
        return False


def _same_constant(answer: Tree, ground_truth: Tree, rules: MathsRules) -> bool:
    left, right = _rational(answer), _rational(ground_truth)
    if left is not None and right is not None:
        return abs(left - right) <= Fraction(rules.relative_tolerance) * abs(right)
    if _close(answer, ground_truth, {}):
        return True
    if rules.relative_tolerance:
        return _within(answer, ground_truth, rules.relative_tolerance)
    return right is None and _is_rounded(answer, ground_truth)


def _rational(tree: Tree) -> Fraction | None:
    try:
        return exact_value(tree, {})
    except (NoValue, KeyError):
        return None


def _within(answer: Tree, ground_truth: Tree, tolerance: float) -> bool:
    try:
        left, right = Digits(40).value(answer, {}), Digits(40).value(ground_truth, {})
    except NoValue:
        return False
    return bool(abs(left - right) <= tolerance * abs(right))


def _is_rounded(answer: Tree, ground_truth: Tree) -> bool:
    """Return True if the answer is the irrational ground truth, rounded to six or more significant digits."""
    numeral = _numeral(answer)
    if numeral is None or numeral[1] < MIN_SIGNIFICANT:
        return False
    value, significant, place = numeral
    work = Digits(80 + significant)
    try:
        exact = work.value(ground_truth, {})
    except NoValue:
        return False
    if exact.imag or not work.context.isfinite(exact) or _is_rational(exact, work.context):
        return False
    return bool(
        abs(exact - work.context.mpf(value.numerator) / value.denominator) * 2
        <= work.context.mpf(10) ** place
    )


def _is_rational(value: Any, context: Any) -> bool:
    """Return True if a value of at least 80 digits is a fraction of small integers: sqrt(1/9) is a third."""
    scale = 10**60
    fraction = Fraction(int(context.nint(value * scale)), scale)
    near = fraction.limit_denominator(10**20)
    return abs(fraction - near) < Fraction(1, 10**50)


def _numeral(tree: Tree) -> tuple[Fraction, int, int] | None:
    """Return value, number of significant digits, and power of ten of the last digit of a written numeral."""
    if isinstance(tree, Number) and tree.numeral:
        mantissa, _, exponent = tree.numeral.lower().partition("e")
        decimals = len(mantissa.partition(".")[2])
        significant = len(mantissa.replace(".", "").lstrip("0"))
        return tree.value, significant, int(exponent or 0) - decimals
    if not isinstance(tree, Call):
        return None
    if tree.name == "neg" and (inner := _numeral(tree.arguments[0])):
        return -inner[0], inner[1], inner[2]
    if tree.name == "*" and (power := _power_of_ten(tree.arguments[1])) is not None:
        inner = _numeral(tree.arguments[0])
        return (inner[0] * Fraction(10) ** power, inner[1], inner[2] + power) if inner else None
    return None


def _power_of_ten(tree: Tree) -> int | None:
    if not (isinstance(tree, Call) and tree.name == "^" and tree.arguments[0] == Number(Fraction(10), "10")):
        return None
    exponent = _rational(tree.arguments[1]) if not symbols(tree.arguments[1]) else None
    if exponent is None or exponent.denominator != 1 or abs(exponent) >= 1000:
        return None
    return int(exponent)
