"""The learned budget of age: what moves it, what it may not do, and a run that resumes with it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from mrl.config.sections.stream import AgeBudgetSection
from mrl.loops.age_budget import AgeBudget
from tests.mrl.loops.table_policy import TableRun, config_of

WAITS, READY = {"stream/waited": 1.0}, {"stream/waited": 0.0}
FAR = {"policy/ess/1": 0.9, "policy/ess/2": 0.4}


def budget_of(*rows: dict[str, float], max_age: int = 3, sync_every: int = 1) -> list[int]:
    """Its value after each row."""
    budget, found = AgeBudget(AgeBudgetSection(patience=2), max_age=max_age, sync_every=sync_every), []
    for row in rows:
        budget.learn(row)
        found.append(budget.value)
    return found


def test_waits_on_end_raise_it_and_distance_lowers_it() -> None:
    assert budget_of(WAITS, READY, WAITS, WAITS) == [1, 1, 1, 2]
    assert budget_of(READY, FAR) == [1, 0]
    assert budget_of(WAITS, WAITS | FAR) == [1, 0], "distance goes before waits"
    assert budget_of(*[READY] * 20) == [1] * 20


def test_a_change_has_passed_before_the_next_one() -> None:
    """Two batches and the one that is trained were admitted before."""
    assert budget_of(FAR, *[WAITS] * 8) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert budget_of(FAR, *[WAITS] * 8, sync_every=3) == [0, 0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("max_age", [0, 1, 6])
def test_it_stays_inside_and_equal_rows_give_equal_budgets(max_age: int) -> None:
    dice = random.Random(max_age)
    rows = [
        {"stream/waited": float(dice.random() < 0.8), "policy/ess/3": dice.uniform(low, low + 0.55)}
        for low in (0.45, 0.0)
        for _ in range(200)
    ]
    found = budget_of(*rows, max_age=max_age)
    assert found == budget_of(*rows, max_age=max_age) and set(found) == set(range(max_age + 1))
    assert all(abs(one - other) <= 1 for one, other in itertools.pairwise(found))


def table_run(folder: Path, name: str, *, min_ess: float) -> TableRun:
    section = f"stream={{max_age: 3, age_budget: {{min_ess: {min_ess}, patience: 1}}}}"
    words = (
        f"run.name={name}",
        "loop.schedule=stream",
        section,
        "loop.checkpoint={every_steps: 1, keep: 99}",
    )
    config = config_of(folder, {}, "loop.steps=16", "training.optimizer.lr=4.0", *words)
    return slow(TableRun(config))


def slow(run: TableRun) -> TableRun:
    run.engines.tokens_per_poll, run.engines.at_once = 1, 10
    return run


def test_a_run_uses_the_age_that_its_budget_allows(tmp_path: Path) -> None:
    """It rises to max_age where nothing is far, and to no age where everything is; tokens are of no greater age than it was."""
    near, far = (table_run(tmp_path, name, min_ess=ess) for name, ess in (("near", 0.01), ("far", 0.9999)))
    assert near.finished() == far.finished() == "done"
    budgets = [[row["stream/age_budget"] for row in run.rows()] for run in (near, far)]
    assert budgets[0][0] == budgets[1][0] == 1 and budgets[0][-1] == 3
    assert 0 in budgets[1] and max(budgets[1]) <= 2
    for run, used in zip((near, far), budgets, strict=True):
        ages = [row["policy/age_steps"] for row in run.rows()]
        assert all(age <= max(used[max(0, n - 3) : n + 1]) for n, age in enumerate(ages))
    assert any(row["policy/age_steps"] == 0 for row in far.rows()[3:])
    assert sum(row["stream/slots_used"] for row in far.rows()) < sum(
        r["stream/slots_used"] for r in near.rows()
    )


def test_a_resumed_run_goes_on_with_its_budget(tmp_path: Path) -> None:
    """Budgets and weights are those of the uninterrupted run, whose decisions are functions of its rows."""
    whole = table_run(tmp_path, "whole", min_ess=0.9)
    assert whole.finished() == "done"
    first = table_run(tmp_path, "cut", min_ess=0.9)
    first.loop.start()
    for _ in range(7):
        first.loop.step()
    second = slow(first.resumed())
    second.loop.start()
    assert second.loop.run() == "done"
    budgets = [[row["stream/age_budget"] for row in run.rows()] for run in (whole, second)]
    assert budgets[0] == budgets[1] and len(set(budgets[0])) > 1
    assert torch.equal(whole.train.table, second.train.table)
