"""Polynomials in one variable over the rationals, and their quotients: what equations are compared with.

A polynomial is a tuple of Fractions from the constant upwards, without zeros at its end. Roots are compared
without being found: by square-free parts, and by Sturm's theorem (W. Hook, P. McAree, "Using Sturm sequences
to bracket real roots of polynomial equations", Graphics Gems, 1990, has it in short).
"""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

Polynomial = tuple[Fraction, ...]

MAX_DEGREE = 40


class TooLarge(ArithmeticError):
    """The degree is over the limit."""


def polynomial(*coefficients: Fraction | int) -> Polynomial:
    """From the constant upwards."""
    values = [Fraction(value) for value in coefficients]
    while values and not values[-1]:
        values.pop()
    if len(values) > MAX_DEGREE + 1:
        raise TooLarge(f"a degree above {MAX_DEGREE}")
    return tuple(values)


ONE = polynomial(1)


def add(left: Polynomial, right: Polynomial) -> Polynomial:
    """The sum."""
    return polynomial(*(a + b for a, b in itertools.zip_longest(left, right, fillvalue=Fraction(0))))


def multiply(left: Polynomial, right: Polynomial) -> Polynomial:
    """The product."""
    values = [Fraction(0)] * max(len(left) + len(right) - 1, 0)
    for n, a in enumerate(left):
        for m, b in enumerate(right):
            values[n + m] += a * b
    return polynomial(*values)


def _divide(above: Polynomial, below: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Quotient and remainder. Raises ZeroDivisionError."""
    if not below:
        raise ZeroDivisionError("division by the polynomial 0")
    rest, quotient = list(above), [Fraction(0)] * max(len(above) - len(below) + 1, 0)
    for shift in reversed(range(len(quotient))):
        quotient[shift] = factor = rest[shift + len(below) - 1] / below[-1]
        for n, b in enumerate(below):
            rest[n + shift] -= factor * b
    return polynomial(*quotient), polynomial(*rest)


def common(left: Polynomial, right: Polynomial) -> Polynomial:
    """The greatest common divisor, with 1 in front."""
    while right:
        left, right = right, _divide(left, right)[1]
    return _monic(left)


def _monic(values: Polynomial) -> Polynomial:
    """With 1 in front."""
    return tuple(value / values[-1] for value in values)


def derivative(values: Polynomial) -> Polynomial:
    """The derivative."""
    return polynomial(*(n * value for n, value in enumerate(values) if n))


def square_free(values: Polynomial) -> Polynomial:
    """The polynomial with the same roots, each once, and 1 in front."""
    return _monic(_divide(values, common(values, derivative(values)))[0] if len(values) > 1 else values)


def has_real_root(values: Polynomial) -> bool:
    """Whether a square-free polynomial has one: sign changes of Sturm's sequence at both infinities."""
    sequence = [values, derivative(values)]
    while sequence[-1]:
        sequence.append(tuple(-value for value in _divide(sequence[-2], sequence[-1])[1]))
    sequence.pop()
    above = [p[-1] > 0 for p in sequence]
    below = [(p[-1] > 0) == (len(p) % 2 == 1) for p in sequence]
    return _changes(below) > _changes(above)


def _changes(signs: list[bool]) -> int:
    return sum(a != b for a, b in itertools.pairwise(signs))


def same_roots(left: Polynomial, right: Polynomial, *, real: bool) -> bool:
    """Whether two polynomials that are not 0 have the same roots; with `real`, the same real ones and at least
    one."""
    left, right = square_free(left), square_free(right)
    if left == right or not real:
        return left == right
    shared = common(left, right)
    if not has_real_root(shared):
        return False
    return not any(has_real_root(_divide(part, shared)[0]) for part in (left, right))


@dataclasses.dataclass(frozen=True, slots=True)
class Quotient:
    """A rational function: a number for `values.exactly`."""

    above: Polynomial
    below: Polynomial = ONE

    def _binary(self, other: Quotient | Fraction) -> Quotient:
        return other if isinstance(other, Quotient) else Quotient(polynomial(other))

    def __add__(self, other: Quotient | Fraction) -> Quotient:
        right = self._binary(other)
        above = add(multiply(self.above, right.below), multiply(right.above, self.below))
        return Quotient(above, multiply(self.below, right.below))

    def __mul__(self, other: Quotient | Fraction) -> Quotient:
        right = self._binary(other)
        return Quotient(multiply(self.above, right.above), multiply(self.below, right.below))

    def __truediv__(self, other: Quotient | Fraction) -> Quotient:
        right = self._binary(other)
        if not right.above:
            raise ZeroDivisionError
        return self * Quotient(right.below, right.above)

    def __rtruediv__(self, other: Fraction) -> Quotient:
        return Quotient(polynomial(other)) / self

    def __neg__(self) -> Quotient:
        return self * Fraction(-1)

    def __sub__(self, other: Quotient | Fraction) -> Quotient:
        return self + -self._binary(other)

    def __rsub__(self, other: Fraction) -> Quotient:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> Quotient:
        if abs(exponent) > MAX_DEGREE:
            raise TooLarge(f"a power above {MAX_DEGREE}")
        result = Quotient(ONE)
        for _ in range(abs(exponent)):
            result = result * self
        return result if exponent >= 0 else Quotient(ONE) / result

    def numerator(self) -> Polynomial:
        """What is above the line in lowest terms."""
        return _divide(self.above, common(self.above, self.below))[0] if self.above else self.above
