"""The learning table of docs/benchmarks.md is whole, has the figures of the readings, and names what is below the bar."""

from __future__ import annotations

import csv
import re
from statistics import mean

import pytest

from benchmarks import learning
from tests.support.source_tree import ROOT

PAGE = (ROOT / "docs/benchmarks.md").read_text()
SECTION = PAGE.split("## Algorithms on the quickstart's task")[1].split("\n## ")[0]
PROSE = " ".join(SECTION.split())
FIGURES = re.compile(r"(0\.\d{3}) -> (0\.\d{3})")
ROUNDING = 1e-3
"""Figures and readings have three digits."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def figures() -> dict[str, tuple[int, list[tuple[float, float]], float]]:
    """Recipe -> its steps, each start's first reading and figure, and their mean."""
    rows = [cells(line) for line in SECTION.splitlines() if FIGURES.search(line)]
    return {
        recipe.split("`")[1]: (
            int(steps),
            [(float(a), float(b)) for cell in starts for a, b in FIGURES.findall(cell)],
            float(total),
        )
        for _, recipe, steps, *starts, total in rows
    }


def curves() -> dict[tuple[str, int], list[float]]:
    """(recipe, start) -> its readings."""
    with (ROOT / "benchmarks/learning_curves.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return {(name, int(start)): [float(cell) for cell in cells if cell] for name, start, *cells in rows}


def test_every_recipe_has_three_starts_and_every_reading() -> None:
    assert set(figures()) == set(learning.RECIPES)
    runs = {(recipe, start) for recipe in learning.RECIPES for start in range(3)}
    assert set(curves()) == runs
    for (recipe, _), readings in curves().items():
        assert len(readings) == 1 + learning.steps_of(recipe) // 20


@pytest.mark.parametrize("recipe", learning.RECIPES)
def test_a_figure_is_the_mean_of_the_last_three_readings(recipe: str) -> None:
    steps, starts, total = figures()[recipe]
    assert steps == learning.steps_of(recipe) and len(starts) == 3
    assert total == pytest.approx(mean(figure for _, figure in starts), abs=ROUNDING)
    for start, (first, figure) in enumerate(starts):
        assert first <= 0.5
        readings = curves()[recipe, start]
        assert readings[0] == first
        assert figure == pytest.approx(learning.figure(readings), abs=ROUNDING)


def test_those_below_the_bar_are_said_to_be() -> None:
    """By the readings: a figure may be rounded up to the bar."""

    def total(recipe: str) -> float:
        return mean(learning.figure(each) for (name, _), each in curves().items() if name == recipe)

    assert {recipe for recipe in learning.RECIPES if total(recipe) < learning.BAR} == set(learning.MISSED)
    assert f"the bar is {learning.BAR} for the mean" in PROSE
    missed = " and ".join(f"`{r}` {{}}by {learning.BAR - total(r):.3f}" for r in learning.MISSED)
    assert f"Ten of twelve reach the bar; {missed.format('misses it ', '')}." in PROSE
    assert (len(learning.RECIPES), len(learning.MISSED)) == (12, 2)
