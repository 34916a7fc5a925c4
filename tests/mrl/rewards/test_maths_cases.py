"""Generated cases of the maths verifier: none is misjudged, and a planted fault in each class is caught."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mrl.rewards.maths import answer_tokens, equality, maths_verifier, polynomials, scalars, shapes, symbolic
from mrl.rewards.maths import expressions as grammar
from mrl.rewards.maths import numbers as plain
from mrl.rewards.maths import relations as solutions
from mrl.rewards.maths import units as unit_list
from mrl.rewards.maths.maths_rules import MathsRules
from tests.support.verifier_cases.case import take
from tests.support.verifier_cases.judged import misjudged
from tests.support.verifier_cases.maths import (
    collections,
    decimals,
    expressions,
    layout,
    numbers,
    relations,
    units,
)

GENERATORS = (
    numbers.GENERATORS
    | units.GENERATORS
    | decimals.GENERATORS
    | relations.GENERATORS
    | collections.GENERATORS
    | expressions.GENERATORS
    | layout.GENERATORS
)
CASES = 200
READ_UNIT = unit_list.read_unit


@pytest.mark.parametrize("name", GENERATORS)
def test_no_case_is_misjudged(name: str) -> None:
    assert misjudged(take(GENERATORS[name], CASES, seed=1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("seed", range(2, 6))
def test_no_case_of_thousands_is_misjudged(name: str, seed: int) -> None:
    assert misjudged(take(GENERATORS[name], 3000, seed=seed)) == []


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    """What was read with a fault, or without one, is not read again."""
    caches = (maths_verifier._ground_truth_quantity, symbolic.read_ground_truth, READ_UNIT)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def any_letters(text: str) -> unit_list.Unit | None:
    """An open list of units."""
    return unit_list.NONE if re.fullmatch(r"[\\{}A-Za-z ]+", text) else READ_UNIT(text)


def near(answer: Any, ground_truth: Any, point: Any) -> bool:
    """An absolute threshold."""
    work = scalars.Digits(40)
    return bool(abs(work.value(answer, point) - work.value(ground_truth, point)) < 1e-6)


def six_decimals(answer: Any, ground_truth: Any) -> bool:
    """Rounding to six decimals, whatever the answer shows."""
    work = scalars.Digits(40)
    return bool(abs(work.value(answer, {}) - work.value(ground_truth, {})) < 5e-7)


def as_sets(answers: Any, ground_truths: Any, rules: MathsRules) -> bool:
    """How often something stands there does not count."""
    pairs = ((answers, ground_truths), (ground_truths, answers))
    return all(any(equality.equal(a, g, rules) for a in some) for some, others in pairs for g in others)


def in_any_order(answer: Any, ground_truth: Any, rules: MathsRules) -> bool:
    return len(answer.items) == len(ground_truth.items) and as_sets(answer.items, ground_truth.items, rules)


def right_side(shape: Any) -> Any:
    """An equation is judged by its right side."""
    return shape.sides[-1] if isinstance(shape, shapes.Relation) else None


def by_value(answer: Any, ground_truth: shapes.Based) -> bool:
    """The base of a number does not count."""
    return isinstance(answer, shapes.Based) and answer.value == ground_truth.value


def without_signs(left: Any, right: Any) -> int | None:
    factor = solutions.ratio(left, right)
    return factor and 1


FAULTS: list[tuple[str, Any, str, Any]] = [
    (
        "maths: notations of numbers",
        plain,
        "_DECIMAL",
        re.compile(r"([+-]?)([0-9,]+)?(?:\.([0-9]*))?()()()()()"),
    ),
    ("maths: unevaluated answers", symbolic, "_is_worked_out", lambda shape: True),
    ("maths: unevaluated answers", plain.Quantity, "is_integer", property(lambda self: False)),
    ("maths: units", unit_list, "read_unit", any_letters),
    ("maths: units", unit_list, "SINGLE_LETTERS", frozenset()),
    ("maths: decimals and close numbers", scalars, "MIN_SIGNIFICANT", 3),
    ("maths: decimals and close numbers", scalars, "_is_rational", lambda value, context: False),
    ("maths: decimals and close numbers", scalars, "_is_rounded", six_decimals),
    ("maths: decimals and close numbers", scalars, "_close", near),
    ("maths: equations", equality, "stated_value", right_side),
    ("maths: equations", solutions, "same_roots", lambda left, right, *, real: True),
    ("maths: equations", polynomials, "has_real_root", lambda values: True),
    ("maths: inequalities", equality, "ratio", without_signs),
    ("maths: inequalities", equality, "solved", lambda shape: None),
    ("maths: lists, sets, intervals, matrices", equality, "_matched", as_sets),
    (
        "maths: lists, sets, intervals, matrices",
        equality,
        "_LIKE",
        {**equality._LIKE, shapes.Series: in_any_order},
    ),
    ("maths: number bases", equality, "_in_base", by_value),
    ("maths: expressions", scalars, "POINTS", 0),
    ("maths: expressions", grammar, "_is_proper", lambda above, below: False),
    ("maths: expressions", answer_tokens, "_UNICODE_TABLE", {}),
    ("maths: complex numbers", grammar, "Constant", grammar.Symbol),
    ("maths: layout", plain, "without_layout", lambda text: text),
    ("maths: layout", plain, "without_braces", lambda text: text),
    ("maths: products with spaces", shapes, "_is_product", lambda run: len(run) == 1),
    ("maths: named tuples and sets", equality, "_spelled", lambda shape: []),
    ("maths: named tuples and sets", equality, "stated_value", right_side),
    (
        "maths: short exponents",
        maths_verifier,
        "as_numerals",
        lambda answer, ground_truth: (answer, ground_truth),
    ),
    ("maths: beyond floats", maths_verifier, "Fraction", lambda tolerance: 0),
]


def test_every_class_has_a_fault() -> None:
    assert {name for name, *_ in FAULTS} == set(GENERATORS)


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize(
    ("name", "module", "attribute", "fault"), FAULTS, ids=[f"{f[0]}, {f[2]}" for f in FAULTS]
)
def test_a_planted_fault_is_caught(
    name: str, module: Any, attribute: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, attribute, fault)
    assert misjudged(take(GENERATORS[name], 110, seed=1))
