"""Evaluate trees: exactly if rational arithmetic is enough, else numerically.

`exact_value` works on any field: Fractions, and the quotients of polynomials that compare equations. `Digits`
is mpmath's arithmetic, real and complex. Nothing larger than the limits below is computed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath
from mpmath.libmp import NoConvergence

from mrl.rewards.maths.expressions import Constant, Number, Symbol, Tree

MAX_BITS = 20_000
"""Maximum size of an exact value in bits, numerator plus denominator."""
_BITS_A_DEGREE = 500
"""Bits that a degree of a quotient of polynomials counts for."""
MAX_MAGNITUDE = 3000
"""Maximum number of decimal digits before or after the point of a power."""
MAX_FACTORIAL = 500


class NoValue(ArithmeticError):
    """The tree has no value here: it is undefined, or beyond the limits."""


class NotRational(NoValue):
    """The tree is not a rational expression."""


# Exact values.


def exact_value(tree: Tree, at: Mapping[str, Any]) -> Any:
    """Return the value of a rational expression whose symbols have the values `at`.

    Raises Inexact for anything but + - * /, constant integer powers, and factorials and binomials of
    integers; NoValue for a division by zero or a value above the limits.
    """
    if isinstance(tree, Number):
        return tree.value
    if isinstance(tree, Symbol):
        return at[tree.name]
    if isinstance(tree, Constant):
        raise NotRational(tree.name)
    operation = _EXACT.get(tree.name)
    if operation is None:
        raise NotRational(tree.name)
    values = [exact_value(argument, at) for argument in tree.arguments]
    try:
        result = operation(*values)
    except ZeroDivisionError as error:
        raise NoValue("division by zero") from error
    if _bits(result) > MAX_BITS:
        raise NoValue("too large")
    return result


def _bits(value: Any) -> int:
    if not isinstance(value, Fraction):
        return _BITS_A_DEGREE * max(0, value.numer.degree(), value.denom.degree()) if value else 0
    return value.numerator.bit_length() + value.denominator.bit_length()


def _exact_power(base: Any, exponent: Any) -> Any:
    if not isinstance(exponent, Fraction) or exponent.denominator != 1:
        raise NotRational("^")
    power = int(exponent)
    if abs(power) * _bits(base) > MAX_BITS:
        raise NoValue("too large")
    if base == 0 and power <= 0:
        raise NoValue("zero to a power that is not positive")
    return base**power


def _exact_integer(value: Any) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise NotRational("not a small natural number")
    return int(value)


def _exact_factorial(value: Any) -> Fraction:
    return Fraction(math.factorial(_exact_integer(value)))


def _exact_binomial(above: Any, below: Any) -> Fraction:
    if _exact_integer(below) > _exact_integer(above):
        raise NoValue("binomial with k > n")
    return Fraction(math.comb(_exact_integer(above), _exact_integer(below)))


def _exact_abs(value: Any) -> Fraction:
    if not isinstance(value, Fraction):
        raise NotRational("abs")
    return abs(value)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "neg": operator.neg,
}
"""Operators that work alike on fractions, quotients of polynomials and mpmath numbers."""
_EXACT: dict[str, Callable[..., Any]] = {
    **_ARITHMETIC,
    "^": _exact_power,
    "!": _exact_factorial,
    "binom": _exact_binomial,
    "abs": _exact_abs,
}


# Values in digits.

_CONTEXT = mpmath.MPContext()
"""Shared, because creating one takes longer than a comparison; each comparison has a process of its own."""


class Digits:
    """Evaluator of trees in mpmath with a given number of digits.

    `reach` sums the decimal digits before or after the point of every literal and power. A nonzero difference
    of two expressions is at least a negative power of ten whose exponent is proportional to `reach` and their
    length. D. Richardson and A. Elsonbaty, "Counterexamples to the uniformity conjecture", 2006, state this
    conjecture for expressions whose powers are written out, as `reach` counts them, and how rarely it fails.
    """

    def __init__(self, digits: int) -> None:
        self.context = _CONTEXT
        self.context.dps = digits
        self.reach = 0.0

    def value(self, tree: Tree, at: Mapping[str, Fraction]) -> Any:
        """Return the value as mpf or mpc. Raises NoValue if it is undefined or beyond the limits."""
        try:
            return self._value(tree, at)
        except (ZeroDivisionError, ValueError, OverflowError, NoConvergence) as error:
            raise NoValue(type(error).__name__) from error

    def _value(self, tree: Tree, at: Mapping[str, Fraction]) -> Any:
        if isinstance(tree, Number):
            self.reach += _bits(tree.value) * math.log10(2)
            return self._rational(tree.value)
        if isinstance(tree, Symbol):
            return self._rational(at[tree.name])
        if isinstance(tree, Constant):
            return self._constant(tree.name)
        if tree.name == "^":
            return self._power(tree.arguments[0], tree.arguments[1], at)
        values = [self._value(argument, at) for argument in tree.arguments]
        result = self._operation(tree.name, values)
        if self.context.isnan(result) or (self.context.isinf(result) and tree.name not in ("neg", "+")):
            raise NoValue("undefined")
        return result

    def _rational(self, value: Fraction) -> Any:
        return self.context.mpf(value.numerator) / value.denominator

    def _constant(self, name: str) -> Any:
        return {"pi": +self.context.pi, "e": +self.context.e, "i": self.context.j, "inf": self.context.inf}[
            name
        ]

    def _power(self, base_tree: Tree, exponent_tree: Tree, at: Mapping[str, Fraction]) -> Any:
        base, exponent = self._value(base_tree, at), self._value(exponent_tree, at)
        if base == 0:
            if self.context.re(exponent) <= 0:
                raise NoValue("zero to a power that is not positive")
            return base
        self._bound(abs(self.context.re(exponent * self.context.log(base))))
        rational = _rational_exponent(exponent_tree)
        if rational is not None and rational.denominator % 2 and not self.context.im(base) and base < 0:
            size = self.context.power(-base, exponent)
            return -size if rational.numerator % 2 else size
        return self.context.power(base, exponent)

    def _bound(self, nats: Any) -> None:
        """Raise NoValue for a power beyond the limit, before it is computed; `nats` is its logarithm."""
        digits = float(nats) / math.log(10)
        if not digits <= MAX_MAGNITUDE:
            raise NoValue("too large")
        self.reach += digits

    def _operation(self, name: str, values: list[Any]) -> Any:
        context = self.context
        if name in _PLAIN:
            return _PLAIN[name](*values)
        if name == "degrees":
            return values[0] * context.pi / 180
        if name == "log":
            return context.log(values[0]) / context.log(values[1])
        if name == "exp":
            self._bound(abs(context.re(values[0])))
            return context.exp(values[0])
        if name in ("sinh", "cosh", "tanh", "sin", "cos", "tan", "sec", "csc", "cot"):
            return self._periodic(name, values[0])
        if name in ("!", "binom"):
            return self._counting(name, values)
        if name in ("floor", "ceil", "max", "min", "gcd", "lcm"):
            return self._ordered(name, values)
        if name not in _MPMATH:
            raise NoValue(name)  # +- that does not stand for two values
        return getattr(context, _MPMATH[name])(*values)

    def _periodic(self, name: str, value: Any) -> Any:
        """Evaluate functions that grow or lose digits for large arguments, or have poles."""
        self._bound(abs(self.context.im(value)) if name[-1] != "h" else abs(self.context.re(value)))
        self._bound(self.context.log(1 + abs(value)))
        if name in _OVER:
            below = self._operation(_OVER[name][1], [value])
            if abs(below) < self.context.mpf(10) ** (-self.context.dps // 2):
                raise NoValue("a pole")
            return self._operation(_OVER[name][0], [value]) / below if _OVER[name][0] else 1 / below
        return getattr(self.context, name)(value)

    def _counting(self, name: str, values: list[Any]) -> Any:
        if any(value != int(abs(value)) or value > MAX_FACTORIAL for value in values):
            raise NoValue("not a small natural number")
        if len(values) == 2 and values[1] > values[0]:
            raise NoValue("binomial with k > n")
        result = self.context.mpf((math.factorial if name == "!" else math.comb)(*map(int, values)))
        self._bound(self.context.log(1 + abs(result)))
        return result

    def _ordered(self, name: str, values: list[Any]) -> Any:
        if any(self.context.im(value) for value in values):
            raise NoValue("complex numbers have no order")
        if name in ("max", "min"):
            return {"max": max, "min": min}[name](values)
        if name in ("floor", "ceil"):
            return getattr(self.context, name)(values[0])
        if any(value != int(value) for value in values):
            raise NoValue("not integers")
        return self.context.mpf(getattr(math, name)(*map(int, values)))


_PLAIN: dict[str, Callable[..., Any]] = {**_ARITHMETIC, "abs": abs}
_OVER = {
    "tan": ("sin", "cos"),
    "cot": ("cos", "sin"),
    "sec": ("", "cos"),
    "csc": ("", "sin"),
    "tanh": ("sinh", "cosh"),
}
_MPMATH = {
    "sqrt": "sqrt", "ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsec": "asec",
    "arccsc": "acsc", "arccot": "acot",
}  # fmt: skip


def _rational_exponent(tree: Tree) -> Fraction | None:
    try:
        value = exact_value(tree, {})
    except (NoValue, KeyError):
        return None
    return value if isinstance(value, Fraction) else None
