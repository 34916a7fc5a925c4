"""Expressions that a small model cannot compute, and a calculator that can."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from mrl.agents.envs.tool_task import ToolTask
from mrl.agents.tools.arithmetic_tool import Arithmetic, value_of
from mrl.agents.tools.tool import ToolBox, ToolError
from mrl.rewards.visible import visible_text

_NUMBER = re.compile(r"-?\d+(?:/\d+|\.\d+)?")


class Calculator(ToolTask):
    """Row: {"prompt": ..., "expression": "37*58"}. Reward 1 if the answer's last number is the value."""

    def __init__(self) -> None:
        super().__init__(ToolBox([Arithmetic()]))

    def score(self, text: str) -> float:
        """Return 1 or 0."""
        numbers = _NUMBER.findall(visible_text(text))
        return float(bool(numbers) and _fraction(numbers[-1]) == value_of(self.task["expression"]))


def calculator_rows(
    count: int, *, seed: int, digits: int = 2, operators: Sequence[str] = "+-*"
) -> Iterator[dict[str, Any]]:
    """Yield `count` different expressions of two numbers of up to `digits` digits; a pure function."""
    rng, seen = random.Random(seed), set()
    while len(seen) < count:
        expression = f"{rng.randrange(10**digits)}{rng.choice(operators)}{rng.randrange(10**digits)}"
        if expression not in seen:
            seen.add(expression)
            yield {"prompt": [{"role": "user", "content": expression}], "expression": expression}


def _fraction(text: str) -> Fraction | None:
    try:
        return value_of(text)
    except ToolError:
        return None
