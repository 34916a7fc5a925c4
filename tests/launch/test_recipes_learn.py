"""The shipped recipes learn the quickstart's task from three supervised starts: long runs, five to ten minutes each on two free cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import learning

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

STARTS = (0, 1, 2)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rows, tokenizer and supervised model of each start."""
    out = tmp_path_factory.mktemp("learning")
    return [learning.sft_start(out, start) for start in STARTS]


@pytest.mark.parametrize("recipe", learning.RECIPES)
def test_a_recipe_learns_from_every_supervised_start(recipe: str, starts: list[Path]) -> None:
    """The mean of the last three readings, and of the starts, is the figure; the largest reading is nobody's."""
    curves = [learning.train(start, recipe) for start in starts]
    assert max(curve[0] for curve in curves) <= 0.5, curves
    assert sum(map(learning.figure, curves)) / len(curves) >= learning.BAR, curves
