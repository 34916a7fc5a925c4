"""Returned values for an expected one: equal in another style, or close."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.verifier_cases.case import Case

_Pair = tuple[str, Any]
"""The program's return expression, and the row's expected value."""


def values(rng: random.Random) -> Iterator[Case]:
    while True:
        for right, table in ((True, _EQUAL), (False, _CLOSE)):
            for label, make in table.items():
                source, expected = make(rng)
                source, expected = _wrapped(source, expected, rng)
                yield _case(source, expected, right, label)


def _case(source: str, expected: Any, right: bool, label: str) -> Case:
    json.dumps(expected)  # as in a row
    program = (
        "import collections, enum\nfrom math import inf, nan\n"
        "class Named(int): pass\nclass Colour(str, enum.Enum): RED = 'red'\n"
        f"def f(x):\n    return {source}"
    )
    ground_truth = {"entry_point": "f", "cases": [{"args": [0], "expected": expected}]}
    return Case("code", f"```python\n{program}\n```", ground_truth, right, label)


def _wrapped(source: str, expected: Any, rng: random.Random) -> _Pair:
    for _ in range(rng.choice((0, 0, 1, 2))):
        match rng.randrange(3):
            case 0:
                source, expected = f"[{source}, 'end']", [expected, "end"]
            case 1:
                source, expected = f"({source},)", [expected]
            case _:
                source, expected = f"{{'key': {source}}}", {"key": expected}
    return source, expected


def _int(rng: random.Random) -> int:
    return rng.choice((1, -1)) * rng.randrange(1, 10 ** rng.choice((1, 3, 9, 17, 40)))


def _float(rng: random.Random) -> float:
    return rng.choice((1, -1)) * rng.uniform(0.1, 1) * 10.0 ** rng.randrange(-30, 30)


def _ints(rng: random.Random) -> list[int]:
    return sorted({_int(rng) for _ in range(rng.randrange(1, 5))})


def _same(make: Callable[[random.Random], Any], shape: str = "{!r}") -> Callable[[random.Random], _Pair]:
    def pair(rng: random.Random) -> _Pair:
        value = make(rng)
        return shape.format(value), value

    return pair


def _moved(factor: float) -> Callable[[random.Random], _Pair]:
    """Return a float near the expected one, by a relative distance."""

    def pair(rng: random.Random) -> _Pair:
        value = _float(rng)
        return repr(value * (1 + rng.choice((1, -1)) * factor)), value

    return pair


def _beside(shape: str, steps: tuple[float, ...]) -> Callable[[random.Random], _Pair]:
    """Return a number near the expected integer."""

    def pair(rng: random.Random) -> _Pair:
        value = rng.randrange(-(10**6), 10**6)
        return shape.format(value + rng.choice(steps)), value

    return pair


_EQUAL: dict[str, Callable[[random.Random], _Pair]] = {
    "integer": _same(_int),
    "integer as a float": _same(lambda rng: rng.randrange(-(2**50), 2**50), "float({!r})"),
    "subclass of int": _same(_int, "Named({!r})"),
    "float": _same(_float),
    "float within the tolerance": _moved(1e-8),
    "infinity": lambda rng: ("-inf", -math.inf),
    "not a number": lambda rng: ("nan", math.nan),
    "zeros": lambda rng: (rng.choice(("-0.0", "0.0", "0")), rng.choice((0.0, 0))),
    "text": _same(lambda rng: rng.choice(("", "a\x00b", "\u00e9\u2028", "1"))),
    "text of an enumeration": lambda rng: ("Colour.RED", "red"),
    "bool": _same(lambda rng: rng.choice((True, False))),
    "none": lambda rng: ("None", None),
    "list": _same(_ints),
    "tuple": _same(_ints, "tuple({!r})"),
    "named tuple": _same(lambda rng: [_int(rng), _int(rng)], "collections.namedtuple('Pair', 'a b')(*{!r})"),
    "set": _same(_ints, "set({!r})"),
    "frozen set": _same(_ints, "frozenset({!r})"),
    "set of tuples": _same(lambda rng: [[_int(rng), "a"], [0, "b"]], "set(map(tuple, {!r}))"),
    "set of nested tuples": lambda rng: ("{(1, (2,))}", [[1, [2]]]),
    "dict": _same(lambda rng: {"a": _int(rng), "b": _float(rng)}),
    "ordered dict": _same(lambda rng: {"b": _int(rng), "a": 1}, "collections.OrderedDict({!r})"),
    "default dict": _same(lambda rng: {"a": _ints(rng)}, "collections.defaultdict(list, {!r})"),
    "counter": lambda rng: ("collections.Counter('aab')", {"a": 2, "b": 1}),
    "integer keys": lambda rng: ("{1: 'a', -20: 'b'}", {"1": "a", "-20": "b"}),
    "keys as JSON writes them": lambda rng: ("{True: 1, None: 2, 0.5: 3}", {"true": 1, "null": 2, "0.5": 3}),
}  # fmt: skip

_CLOSE: dict[str, Callable[[random.Random], _Pair]] = {
    "integer beside": _same(lambda rng: _int(rng), "{!r} + 1"),
    "float beside an integer": _beside("{!r}", (1e-7, -1e-7, 1e-9)),
    "rounded large integer": lambda rng: (f"float(10**17 + {(n := rng.randrange(1, 8))})", 10**17 + n),
    "float beyond the tolerance": _moved(3e-6),
    "tiny for zero": lambda rng: (repr(10.0 ** -rng.randrange(7, 300)), 0.0),
    "zero for tiny": lambda rng: ("0.0", 10.0 ** -rng.randrange(7, 300)),
    "infinity for large": lambda rng: ("inf", 1.7e308),
    "not a number for a number": _same(_float, "nan if {!r} else 0"),
    "bool for an integer": lambda rng: ("True", 1), "integer for a bool": lambda rng: ("0", False),
    "text for a number": _same(_int, "str({!r})"), "number for text": lambda rng: ("1", "1"),
    "bytes for text": lambda rng: ("b'a'", "a"), "none for zero": lambda rng: ("None", 0),
    "empty of another kind": lambda rng: ("{}", []),
    "list in another order": _same(lambda rng: [2, _int(rng) + 10**41], "{!r}[::-1]"),
    "list for a text": lambda rng: ("['a', 'b']", "ab"), "longer list": _same(_ints, "{!r} + [1]"),
    "shorter set": _same(lambda rng: [1, 2], "set({!r}[:1])"),
    "set for a list with doubles": lambda rng: ("{1}", [1, 1]),
    "float beside an element of a set": lambda rng: ("{1.0000001}", [1]),
    "bool in a set": lambda rng: ("{True}", [1]), "another key": lambda rng: ("{1: 'a'}", {"2": "a"}),
    "one key twice": lambda rng: ("{1: 'a', '1': 'a'}", {"1": "a"}),
    "too large for a float": lambda rng: ("10**400", 1e300),
    "too many digits for a key": lambda rng: ("{10**5000: 1}", {"1": 1}),
    "equal to everything": lambda rng: ("type('L', (), {'__eq__': lambda s, o: True})()", 1),
    "subclass that lies": lambda rng: ("type('I', (int,), {'__eq__': lambda s, o: True})(3)", 4),
}  # fmt: skip
