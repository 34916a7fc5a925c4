"""A question that is answered with tools: turns with calls have results, and the first turn without one is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall
from mrl.agents.tools.tool import ToolBox


class ToolTask:
    """A subclass makes the tools, and says what an answer is worth."""

    def __init__(self, box: ToolBox) -> None:
        self.box = box
        self.tools = box.schemas
        self.task: dict[str, Any] = {}
        self.calls = 0

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """The row's own prompt stands."""
        self.task = task
        return ""

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """The results, or the end."""
        self.calls += len(calls)
        if calls:
            return Step(self.box.messages(calls))
        return Step(reward=self.score(text), done=True, info={"calls": self.calls})

    def close(self) -> None:
        """Ends the tools."""
        self.box.close()

    def score(self, text: str) -> float:
        """What the answer is worth."""
        raise NotImplementedError
