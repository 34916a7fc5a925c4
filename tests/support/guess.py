"""A number is guessed: a game of several turns."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall


class Guess:
    """The secret is a number from 1 to `highest`, the same for all samples of a prompt. After a guess the policy is told whether the
    secret is higher or lower, eight times at most; finding it is worth 1."""

    def __init__(self, highest: int = 64) -> None:
        self._highest, self._turns_left = highest, 8

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """The rules, where the row has no prompt of its own ("prompt" there is not empty)."""
        self._secret = random.Random(seed).randint(1, self._highest)
        return str(task.get("opening", f"Guess my number from 1 to {self._highest}."))

    async def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """Higher, lower, or found."""
        self._turns_left -= 1
        numbers = re.findall(r"-?\d+", text)
        guess = int(numbers[-1][:9]) if numbers else 0
        if guess == self._secret or not self._turns_left:
            return Step(reward=float(guess == self._secret), done=True)
        return Step("higher" if guess < self._secret else "lower")

    def close(self) -> None:
        """Nothing to end."""
