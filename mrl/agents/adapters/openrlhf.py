"""Environments that are written as an AgentInstance of OpenRLHF.

Their interface: `async reset({"observation", "label"}) -> {"observation"}`, then for each turn
`async step({"observation_text", "action_text", "label"}) -> {"rewards", "environment_feedback", "done"}`.
Source: https://openrlhf.readthedocs.io/en/latest/async_rl.html. Feedback is a message of the user here, put between turns by the
chat template: a feedback that holds marks of a template of its own is shown with them as plain text.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall
from mrl.own_code import find_callable


class OpenRLHF:
    """Around the class that `path` names. Row: {"prompt": ..., "label": ...}, or {"answer": ...}."""

    def __init__(self, path: str) -> None:
        _, make = find_callable(path, setting="agent.options.path", what="class")
        self._agent = make()
        self._seen, self._label = "", None

    async def reset(self, task: dict[str, Any], seed: int) -> str:
        """The observation that it makes of the prompt; the prompt stands where it leaves it as it is."""
        prompt = task.get("prompt", "")
        self._label = task.get("label", task.get("answer"))
        said = await _awaited(self._agent.reset({"observation": prompt, "label": self._label}))
        self._seen = str(said["observation"])
        return "" if self._seen == prompt else self._seen

    async def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """Its rewards, feedback and end."""
        state = {"observation_text": self._seen, "action_text": text, "label": self._label}
        said = await _awaited(self._agent.step(state))
        feedback = str(said.get("environment_feedback", ""))
        self._seen += text + feedback
        logs = said.get("extra_logs") or {}
        info = {str(name): number for name, value in logs.items() if (number := _number(value)) is not None}
        return Step(feedback, _number(said["rewards"]), bool(said["done"]), info)

    async def close(self) -> None:
        """Its own close, where it has one."""
        if hasattr(self._agent, "close"):
            await _awaited(self._agent.close())


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _number(value: Any) -> Any:
    """A number, or a tensor of one, as a float; None for what is neither."""
    value = value.item() if hasattr(value, "item") else value
    return float(value) if isinstance(value, int | float) else None
