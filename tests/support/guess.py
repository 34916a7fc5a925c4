"""A number is guessed: a game of several turns, with a reward for each, and with time that passes."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Sequence
from typing import Any

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall
from mrl.rewards.visible import visible_text

_NUMBER = re.compile(r"-?\d+")


class Guess:
    """The secret is a number from 1 to `highest`, the same for all samples of a prompt. After a guess the policy is told whether the
    secret is higher or lower."""

    def __init__(
        self,
        highest: int = 64,
        *,
        turn_rewards: bool = True,
        tries: int = 8,
        seconds: float | tuple[float, float] = 0.0,
    ) -> None:
        """`turn_rewards`: a turn is worth the share of the doubt (the logarithm of the numbers left) that it removed, all of them
        together 1 where the secret is found; else finding it is worth 1, and nothing before. `seconds`: what an answer takes, drawn
        by the seed: the mean of an exponential distribution, or the bounds of a uniform one."""
        self._highest, self._turn_rewards, self._tries, self._seconds = highest, turn_rewards, tries, seconds
        self._low, self._high, self._turn = 1, highest, 0

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """The rules, where the row has no prompt of its own ("prompt" there is not empty)."""
        self._rng = random.Random(seed)
        self._secret = self._rng.randint(1, self._highest)
        return str(task.get("opening", f"Guess my number from 1 to {self._highest}."))

    async def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """Higher, lower, or found."""
        await asyncio.sleep(self._wait())
        self._turn += 1
        numbers = _NUMBER.findall(visible_text(text))
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else None
        before = self._high - self._low + 1
        self._narrow(guess)
        found = guess == self._secret
        reward = self._share(before) if self._turn_rewards else float(found)
        if found or self._turn == self._tries:
            return Step(reward=reward, done=True, info={"found": found})
        if guess is None:
            return Step("Say a number.", reward)
        return Step("higher" if guess < self._secret else "lower", reward)

    def close(self) -> None:
        """Nothing to end."""

    def _wait(self) -> float:
        if isinstance(self._seconds, int | float):
            return self._rng.expovariate(1 / self._seconds) if self._seconds else 0.0
        return self._rng.uniform(*self._seconds)

    def _narrow(self, guess: int | None) -> None:
        if guess is None:
            return
        if guess <= self._secret:
            self._low = max(self._low, guess + (guess < self._secret))
        if guess >= self._secret:
            self._high = min(self._high, guess - (guess > self._secret))

    def _share(self, before: int) -> float:
        after = self._high - self._low + 1
        return math.log(before / after) / math.log(max(self._highest, 2))
