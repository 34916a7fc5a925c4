"""Printed output against a task's expected output."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.rewards.code.compare_output import same_output

SAME = [
    ("3\n", "3"), ("3  \n\n", "3"), ("\n3", "3"), ("1 2", "1  2 "), ("1\t2", "1 2"), ("2.0", "2"),
    ("2", "2.0"), ("+2", "2"), ("0.3333333333333333", "0.333333333"), ("1e-3", "0.001"), ("-0.0", "0"),
    ("1.2e-17", "0.000000"), ("1e500", "1e500"), ("1.0e500", "1e500"), ("Case #1: 0.5000000", "Case #1: 0.5"),
    ("yes 1.50", "yes 1.5"), ("0010", "0010"), ("", "\n"), ("a b", "a b"),
]  # fmt: skip
OTHER = [
    ("3", "4"), ("12", "1 2"), ("1\n2", "1 2"), ("1 2", "1 2 3"), ("1", "1\n1"), ("a  b", "a b"),
    ("  *", "*\n"), ("10", "0010"), ("0.34", "0.33"), ("0.5", "0.54"), ("0.0", "0.0000001"),
    ("1000001", "1000002"), ("100000000000000001", "100000000000000000"), ("1e999", "1.5"), ("nan", "1.5"),
    ("inf", "1e400"), ("1.5", "inf"), ("YES", "NO"), ("", "0"), ("1.2.3", "1.2.30"), ("٣", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "wanted"), SAME)
def test_the_same(written: str, wanted: str) -> None:
    assert same_output(written, wanted)


@pytest.mark.parametrize(("written", "wanted"), OTHER)
def test_another(written: str, wanted: str) -> None:
    assert not same_output(written, wanted)


@pytest.mark.parametrize(
    ("written", "wanted", "right"),
    [
        ("0.5001", "0.5", True), ("0.52", "0.5", False), ("1000.9", "1000.1", True), ("2.0001", "2", True),
        ("1000000", "1000001", False), ("0.0005", "0.000000", True), ("1e400", "1.5", False),
    ],
)  # fmt: skip
def test_a_tasks_own_tolerance_is_absolute_or_relative(written: str, wanted: str, right: bool) -> None:
    assert same_output(written, wanted, 1e-3) is right


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.data())
@settings(max_examples=300, deadline=None)
def test_numbers_in_another_notation_are_the_same_and_those_beside_are_not(values, data) -> None:
    wanted = " ".join(map(repr, values))
    assert same_output("  ".join(f"{value:.17e}" for value in values) + "\n", wanted)
    at = data.draw(st.integers(0, len(values) - 1))
    moved = values[at] * (1 + 1e-5)
    if math.isfinite(moved) and abs(moved - values[at]) > 1e-6:
        beside = [repr(moved if n == at else value) for n, value in enumerate(values)]
        assert not same_output(" ".join(beside), wanted)


@given(
    st.text(alphabet="0159.eE+-_ \n\u0663naif", max_size=40), st.text(alphabet="0159.eE+- \n", max_size=40)
)
@settings(max_examples=500, deadline=None)
def test_no_text_makes_the_comparison_raise(written: str, wanted: str) -> None:
    for tolerance in (None, 0.0, 1e-3):
        same_output(written, wanted, tolerance)
        assert same_output(wanted, wanted, tolerance)
