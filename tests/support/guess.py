"""A number guessing game of several turns."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall


class Guess:
    """Asks for a number from 1 to `highest`, one per prompt; eight hints at most, reward 1 for finding it."""

    def __init__(self, highest: int = 64) -> None:
        self._highest, self._turns_left = highest, 8

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """Return the rules if the row has no prompt of its own."""
        self._secret = random.Random(seed).randint(1, self._highest)
        return str(task.get("opening", f"Guess my number from 1 to {self._highest}."))

    async def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        self._turns_left -= 1
        numbers = re.findall(r"-?\d+", text)
        guess = int(numbers[-1][:9]) if numbers else 0
        if guess == self._secret or not self._turns_left:
            return Step(reward=float(guess == self._secret), done=True)
        return Step("higher" if guess < self._secret else "lower")

    def close(self) -> None:
        """Do nothing."""
