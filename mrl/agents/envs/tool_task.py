"""Questions answered with tools: turns with calls get results; the first turn without calls is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall
from mrl.agents.tools.tool import ToolBox


class ToolTask:
    """Base of such tasks. A subclass makes the tools and scores the answer."""

    def __init__(self, box: ToolBox) -> None:
        self.box = box
        self.tools = box.schemas
        self.task: dict[str, Any] = {}
        self.calls = 0

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """Return nothing, so that the row's own prompt is used."""
        self.task = task
        return ""

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """Return the results of the calls, or the end."""
        self.calls += len(calls)
        if calls:
            return Step(self.box.messages(calls))
        return Step(reward=self.score(text), done=True, info={"calls": self.calls})

    def close(self) -> None:
        """Close the tools."""
        self.box.close()

    def score(self, text: str) -> float:
        """Return the reward of the answer."""
        raise NotImplementedError
