"""HumanEval: every canonical solution is accepted, and honest incorrect programs are not."""

import ast
import json
from typing import Any

import pytest

from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.tasks import parse_task
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from tests import data_sets

RULES = CodeRules(seconds=20.0, cpu_seconds=10.0)

RIGHT_BY_CHANCE = {"HumanEval/34": ("first example only",)}
"""Task -> wrong programs that its own test accepts: this test has a single assert."""

WRONG = ("empty body", "constant", "first example only")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    tasks = data_sets.rows("human_eval")
    assert len(tasks) == (164 if data_sets.WHOLE else 13)
    return tasks


def body(name: str, row: dict[str, Any]) -> str:
    """Return an honest incorrect program of one kind."""
    if name == "empty body":
        return "    pass\n"
    if name == "constant":
        return "    return 0\n"
    call, value = first_example(row)
    return (
        f"    if __import__('json').dumps(list(locals().values()), default=str) == {call!r}:\n"
        f"        return {value!r}\n"
    )


def first_example(row: dict[str, Any]) -> tuple[str, Any]:
    """Return the first assert `candidate(args) == value` of the test with plain values."""
    for node in ast.walk(ast.parse(row["test"])):
        if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Call):
            continue
        try:
            args = [ast.literal_eval(argument) for argument in node.left.args]
            return json.dumps(args, default=str), ast.literal_eval(node.comparators[0])
        except ValueError:
            continue
    return "[]", None


def test_canonical_solutions_are_accepted_and_wrong_programs_are_not(rows, make_pair, score_all) -> None:
    pairs = []
    for number, row in enumerate(rows):
        task = parse_task(row, place=row["task_id"])
        programs = [row["canonical_solution"], *(body(name, row) for name in WRONG)]
        for position, program in enumerate(programs):
            response = f"```python\n{program}\n```"
            pairs.append(make_pair(number, response, task, sample_index=position))
    section = RewardSection.model_validate(
        {"kind": "code", "code": RULES, "workers": 2, "deadline_seconds": 60.0}
    )
    with RewardPool(section) as pool:
        verdicts = score_all(pool, pairs, seconds=240.0)
    rejected = [row["task_id"] for n, row in enumerate(rows) if verdicts[f"{n}.0"].value != 1.0]
    assert rejected == []
    passed = {
        row["task_id"]: names
        for n, row in enumerate(rows)
        if (
            names := tuple(name for k, name in enumerate(WRONG, start=1) if verdicts[f"{n}.{k}"].value != 0.0)
        )
    }
    assert passed == RIGHT_BY_CHANCE
