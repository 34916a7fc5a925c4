"""Text verifiers misjudge no generated case."""

import pytest

from tests.support.verifier_cases import instructions, places, shapes
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

MATHS = (collections, decimals, expressions, layout, numbers, relations, units)
GENERATORS = {name: make for kind in MATHS for name, make in kind.GENERATORS.items()}
TEXTS = places.GENERATORS | instructions.GENERATORS | shapes.GENERATORS


@pytest.mark.parametrize("name", GENERATORS | TEXTS)
@pytest.mark.parametrize(("count", "seed"), [(60, 1), pytest.param(3000, 2, marks=pytest.mark.slow)])
def test_no_case_is_misjudged(name: str, count: int, seed: int) -> None:
    assert misjudged(take((GENERATORS | TEXTS)[name], count, seed=seed)) == []
