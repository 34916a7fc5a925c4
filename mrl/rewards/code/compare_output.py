"""Comparison of a program's output with the expected one, as online judges do: by line, and numbers by value.

Ignored are spaces at the end of a line, empty lines at both ends and the spacing of lines that contain only
numbers. An expected integer equals only itself, also as 2.0. An expected number with a point or exponent
equals one within its last digit and 1e-6, or within a relative error of 1e-6. A task's own tolerance bounds
the absolute or relative error, whichever is larger, also of an expected integer if the output has a point.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
"""0010 is not a number: its zeros may matter."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
_SPACE = re.compile(r"(\s+)")
_TOLERANCE = 1e-6


def same_output(written: str, wanted: str, tolerance: float | None = None) -> bool:
    """Return True if the output equals the expected one; `tolerance` is the task's own. Raises nothing."""
    mine, yours = _lines(written), _lines(wanted)
    return len(mine) == len(yours) and all(
        one == other or _same_line(one, other, tolerance) for one, other in zip(mine, yours, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().lstrip("\r\n").splitlines()]


def _same_line(mine: str, yours: str, tolerance: float | None) -> bool:
    only_numbers = all(map(_NUMBER.fullmatch, yours.split()))
    left, right = (line.split() if only_numbers else _SPACE.split(line) for line in (mine, yours))
    return len(left) == len(right) and all(
        one == other or _same_number(one, other, tolerance) for one, other in zip(left, right, strict=True)
    )


def _same_number(mine: str, yours: str, tolerance: float | None) -> bool:
    if not (_NUMBER.fullmatch(mine) and _NUMBER.fullmatch(yours)):
        return False
    left, right = Decimal(mine), Decimal(yours)
    if left == right:
        return True
    if _INTEGER.fullmatch(yours) and (tolerance is None or _INTEGER.fullmatch(mine)):
        return False
    size = abs(float(right))
    if tolerance is None:
        last_digit = float(Decimal((0, (5,), int(right.as_tuple().exponent) - 1)))
        allowed = max(_TOLERANCE * size, min(_TOLERANCE, last_digit))
    else:
        allowed = tolerance * max(1.0, size)
    return abs(float(left) - float(right)) <= allowed
