"""Values that cross the sandbox: round trip, refusals and rules of equality."""

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import RewardError
from mrl.rewards.code.tagged_values import MAX_INT_BITS, ForeignValue, decode_value, encode_value, same
from mrl.rewards.contract import checked_value
from tests.support.programs import misjudged
from tests.support.verifier_cases.code.values import values

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def exactly(a: Any, b: Any) -> bool:
    """Compare values strictly: types, NaN and signs count."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.isnan(a) == math.isnan(b) and (
            math.isnan(a) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(exactly, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(exactly(a[key], b[key]) for key in a)
    return a == b


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_the_round_trip_is_the_identity(value: Any) -> None:
    assert exactly(decode_value(json.loads(json.dumps(encode_value(value)))), value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda i: st.lists(i) | st.dictionaries(st.text(max_size=2), i),
    )
)
@settings(max_examples=100, deadline=None)
def test_arbitrary_data_is_decoded_or_refused_never_worse(data: Any) -> None:
    with contextlib.suppress(ForeignValue):
        decode_value(data)


@pytest.mark.parametrize("value", [10**400, -(10**4000), math.inf, math.nan, "1", None], ids=range(6))
def test_a_reward_that_is_no_finite_float_is_refused(value: Any) -> None:
    with pytest.raises(RewardError, match="verifier own:"):
        checked_value(value, verifier="own")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"l": [value]}
    return value


@pytest.mark.parametrize(
    "data",
    [
        {"x": "Liar"}, {}, {"l": 3}, {"q": 1}, {"f": "1"*10 + "z"}, {"i": "0x" + "f" * MAX_INT_BITS},
        {"l": [1], "t": [2]}, [1, 2], {"d": [[{"l": []}, 1]]}, {"d": [[1]]}, {"s": [{"l": []}]},
        {"c": ["0x1p0"]}, {"b": "xyz"}, nested(200), 1.5, {"l": [0] * 300_000},
    ],
    ids=lambda d: str(d)[:30],
)  # fmt: skip
def test_what_is_not_built_in_is_refused(data: Any) -> None:
    with pytest.raises(ForeignValue):
        decode_value(data)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (0.1 + 0.2, 0.3), (math.nan, math.nan), (math.inf, math.inf), (-0.0, 0.0), ((1, 2), [1, 2]),
     ({1: "a"}, {"1": "a"}), ({3, 1}, [1, 3]), ({(1,)}, [[1]]), (3.0, 3), ({True: 1}, {"true": 1}),
     ([(1,)], [[1]]), (10**400, 10**400), (None, None), ("a", "a")],
)  # fmt: skip
def test_equal(value: Any, expected: Any) -> None:
    assert same(value, expected, tolerance=1e-6)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 1), (1, True), ("1", 1), (math.nan, 1.0), (math.inf, -math.inf), (1e308, math.inf),
     (10**400, 1.0), ([1], [1, 1]), ("ab", ["a", "b"]), (None, 0), (0, None), ([], {}), (1.001, 1.0),
     (1.0000001, 1), ([1.0000001], [1]), (1e-12, 0.0), ({True}, [1]), (1e17, 10**17 + 1), (2.0, [2.0]),
     (10**17 + 1, 10**17), ({1: 1, "1": 2}, {"1": 2}), (b"a", "a"), ([1, 1], {1})],
)  # fmt: skip
def test_unequal(value: Any, expected: Any) -> None:
    assert not same(value, expected, tolerance=1e-6)


def test_generated_values_are_told_apart() -> None:
    assert misjudged(values, 1000) == []
