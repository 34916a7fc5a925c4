"""Values that cross the sandbox: built-in types as tagged JSON, decoded strictly and compared by these rules.

An expected float, also inside a list, tuple or dict, equals a number within the task's relative tolerance;
NaN equals NaN, -0.0 equals 0.0, and only zero equals 0.0. Everything else compares exactly: integers (3.0 is
3), elements of sets and keys of dicts. bool is never a number. A list equals a tuple and, if expected (JSON
has no sets), a set; an expected text key equals the key that JSON writes as this text.
"""

from __future__ import annotations

import cmath
import json
import math
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from mrl.rewards.code import runner

MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_INT_BITS = 65_536


class ForeignValue(ValueError):
    """Value that does not consist of built-in types or exceeds the limits."""


def encode_value(value: Any) -> Any:
    """Encode an input of the candidate; TypeError for other types, ValueError if too deep."""
    return runner.encode_tagged(value, foreign=_refuse)


def _refuse(name: str) -> NoReturn:
    if name == runner.TOO_DEEP:
        raise ValueError(f"an argument is {name}")
    raise TypeError(f"an argument of type {name} cannot be passed to a candidate")


def decode_value(data: Any) -> Any:
    """Decode a candidate's value; raise ForeignValue if it breaks the format or its limits."""
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
    make = {"l": list, "t": tuple, "s": set, "z": frozenset}[tag]
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
    """Return True if a decoded value equals the expected one. May raise for incorrect values, like `==`."""
    if isinstance(expected, float | complex):
        return _near(value, expected, tolerance)
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(
            same(mine, yours, tolerance=tolerance) for mine, yours in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        return _same_dict(value, expected, tolerance)
    if isinstance(value, set | frozenset) and isinstance(expected, set | frozenset | list):
        return len(value) == len(expected) and _elements(value) == _elements(expected)
    return _exact(value) == _exact(expected)


def _same_dict(value: dict[Any, Any], expected: dict[Any, Any], tolerance: float) -> bool:
    if all(isinstance(key, str) for key in expected):
        mine, yours = {_key_text(key, expected): item for key, item in value.items()}, expected
    else:
        mine, yours = ({_exact(key): item for key, item in part.items()} for part in (value, expected))
    return (
        len(value) == len(expected)
        and mine.keys() == yours.keys()
        and all(same(mine[key], item, tolerance=tolerance) for key, item in yours.items())
    )


def _key_text(key: Any, expected: dict[str, Any]) -> str:
    """Return a key's text in JSON or its `str`, whichever the data set uses."""
    if isinstance(key, str):
        return key
    text = json.dumps(key) if key is None or isinstance(key, bool | int | float) else str(key)
    return text if text in expected else str(key)


def _near(value: Any, expected: complex, tolerance: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        return False
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return False
    both_nan = cmath.isnan(value) and cmath.isnan(expected)
    return both_nan or value == expected or cmath.isclose(value, expected, rel_tol=tolerance)


def _exact(value: Any) -> Any:
    """Return a hashable form that is equal for equal values."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and math.isnan(value):
        return ("nan",)
    if isinstance(value, list | tuple):
        return ("list", tuple(map(_exact, value)))
    if isinstance(value, set | frozenset):
        return ("set", _elements(value))
    if isinstance(value, dict):
        return ("dict", _elements(value.items()))
    return value


def _elements(values: Iterable[Any]) -> frozenset[Any]:
    return frozenset(map(_exact, values))
