"""Generated cases of the verifiers that read text: none is misjudged."""

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


@pytest.mark.parametrize("name", [*GENERATORS, *TEXTS])
def test_no_case_is_misjudged(name: str) -> None:
    cases = take(GENERATORS[name], 200, seed=1) if name in GENERATORS else take(TEXTS[name], 600, seed=1)
    assert misjudged(cases) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATORS)
def test_no_case_of_thousands_is_misjudged(name: str) -> None:
    assert misjudged(take(GENERATORS[name], 3000, seed=2)) == []
