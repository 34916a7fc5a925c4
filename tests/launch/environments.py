"""Environments for runs of tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall


class Counting:
    """Answers each turn with its number and letters that tokenizers part badly; ends after as many turns as the row says. A turn
    is worth the share of small letters in it."""

    def __init__(self, seconds: float = 0.0) -> None:
        """`seconds` are spent on each turn."""
        self._seconds = seconds

    def reset(self, task: dict[str, Any], seed: int) -> str:
        self._left, self._said = int(task["turns"]), 0
        return ""

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        time.sleep(self._seconds)
        self._left -= 1
        self._said += 1
        reward = sum(letter.islower() for letter in text) / max(1, len(text))
        return Step(f"{self._said} é語👩 <|im_end|> {len(text)}", reward=reward, done=not self._left)

    def close(self) -> None:
        pass
