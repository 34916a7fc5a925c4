"""Compare equations by polynomials in one variable over the rationals, with sympy. Roots are compared without
computing them: by square-free parts, and by Sturm's theorem."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from sympy import QQ
from sympy.polys.fields import field
from sympy.polys.rootisolation import dup_count_real_roots

_FIELD, _VARIABLE = field("t", QQ)


def line(slope: Fraction, constant: Fraction) -> Any:
    """Return the polynomial slope * t + constant as a value for `values.exactly`."""
    return QQ(slope.numerator, slope.denominator) * _VARIABLE + QQ(constant.numerator, constant.denominator)


def numerator(value: Any) -> Any:
    """Return the numerator of a quotient of polynomials in lowest terms; a Fraction has degree 0."""
    return _FIELD.from_expr(value).numer if isinstance(value, Fraction) else value.numer


def same_roots(left: Any, right: Any, *, real: bool) -> bool:
    """Return True if two nonzero polynomials have equal roots; if `real`, equal real roots, at least one."""
    left, right = left.sqf_part().monic(), right.sqf_part().monic()
    if left == right or not real:
        return left == right
    shared = left.gcd(right)
    if not _has_real_root(shared):
        return False
    return not any(_has_real_root(part.exquo(shared)) for part in (left, right))


def _has_real_root(polynomial: Any) -> bool:
    return dup_count_real_roots(polynomial.to_dense(), QQ) > 0
