"""Values that cross the sandbox: built-in types only, as tagged JSON, decoded strictly and compared by
stated rules.

bool is never a number; int and float compare by value; a list stands for a tuple; NaN equals NaN; floats
compare within the task's relative tolerance; sets and dicts compare by their elements.
"""

from __future__ import annotations

import math
from typing import Any

MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_INT_BITS = 65_536


class ForeignValue(ValueError):
    """A value that is not built of built-in types, or exceeds the limits."""


def encode(value: Any) -> Any:
    """Inputs for the candidate. Raises TypeError for a type that does not cross."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -(2**53) < value < 2**53 else {"i": hex(value)}
    if kind is float:
        return {"f": value.hex()}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind in (list, tuple):
        return {"l" if kind is list else "t": [encode(item) for item in value]}
    if kind in (set, frozenset):
        return {"s": [encode(item) for item in value]}
    if kind is dict:
        return {"d": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"an argument of type {kind.__name__} cannot be handed to a candidate")


def decode(data: Any) -> Any:
    """A candidate's value. Raises ForeignValue for anything that breaks the format or its limits."""
    return _decode(data, 0, [MAX_NODES])


def _decode(data: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth > MAX_DEPTH or left[0] < 0:
        raise ForeignValue("nested too deep or too large")
    if data is None or isinstance(data, bool | str):
        return data
    if isinstance(data, int):
        return _checked_int(data)
    if not isinstance(data, dict) or len(data) != 1:
        raise ForeignValue(f"a {type(data).__name__} without a tag")
    ((tag, body),) = data.items()
    if tag == "x":
        raise ForeignValue(f"a value of type {str(body)[:60]}")
    try:
        return _tagged(tag, body, depth, left)
    except (TypeError, LookupError, OverflowError, AttributeError, ValueError) as error:
        if isinstance(error, ForeignValue):
            raise
        raise ForeignValue(f"a malformed value ({tag[:5]!r})") from error


def _tagged(tag: str, body: Any, depth: int, left: list[int]) -> Any:
    if tag == "i":
        if len(body) > MAX_INT_BITS // 4 + 4:
            raise ForeignValue("an integer that is too large")
        return _checked_int(int(body, 16))
    if tag == "f":
        return float.fromhex(body)
    if tag == "c":
        return complex(float.fromhex(body[0]), float.fromhex(body[1]))
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "d":
        return {_decode(key, depth + 1, left): _decode(item, depth + 1, left) for key, item in _list(body)}
    make = {"l": list, "t": tuple, "s": set}[tag]
    return make([_decode(item, depth + 1, left) for item in _list(body)])


def _list(body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise ForeignValue("a container without elements")
    return body


def _checked_int(value: int) -> int:
    if value.bit_length() > MAX_INT_BITS:
        raise ForeignValue("an integer that is too large")
    return value


def same(value: Any, expected: Any, *, tolerance: float) -> bool:
    """True where a decoded value equals the expected one; see the module for the rules."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return type(value) is type(expected) and value == expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return _same_number(value, expected, tolerance)
    if isinstance(value, complex) and isinstance(expected, complex | float | int):
        number = complex(expected)
        return _same_number(value.real, number.real, tolerance) and _same_number(
            value.imag, number.imag, tolerance
        )
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(
            same(mine, yours, tolerance=tolerance) for mine, yours in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        return _same_dict(value, expected, tolerance)
    if isinstance(value, set | frozenset) and isinstance(expected, set | frozenset | list):
        return len(value) == len(expected) and value == set(expected)
    return type(value) is type(expected) and value == expected


def _same_dict(value: dict[Any, Any], expected: dict[Any, Any], tolerance: float) -> bool:
    if len(value) != len(expected):
        return False
    plain = (
        {str(key): item for key, item in value.items()}
        if all(isinstance(k, str) for k in expected)
        else value
    )
    return plain.keys() == expected.keys() and all(
        same(plain[key], item, tolerance=tolerance) for key, item in expected.items()
    )


def _same_number(value: float, expected: float, tolerance: float) -> bool:
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected
    try:
        value, expected = float(value), float(expected)
    except OverflowError:
        return False
    if math.isnan(expected) or math.isnan(value):
        return math.isnan(expected) and math.isnan(value)
    return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
