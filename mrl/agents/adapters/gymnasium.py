"""Environments in Gymnasium's form: `reset(seed, options) -> (observation, info)` and `step(action) ->
(observation, reward, terminated, truncated, info)`. Source: https://gymnasium.farama.org/api/env. The package
itself is not needed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall
from mrl.rewards.visible import visible_text
from mrl.user_code import find_callable

_NUMBER = re.compile(r"-?\d+")


class Gymnasium:
    """Adapter of the environment that `path` makes. An observation that is not text is shown as JSON."""

    def __init__(
        self,
        path: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        action: Literal["text", "number", "choice"] = "text",
        choices: Sequence[str] = (),
        invalid: str = "That is no action.",
    ) -> None:
        """`path`: class or function that is called with `arguments`. A turn's action is its visible text, the
        last whole number in it, or the index of the one of `choices` that it names last. If it has none, the
        policy is told `invalid` and no step is made."""
        self._environment = find_callable(path, setting="agent.options.path", kind="class")[1](
            **(arguments or {})
        )
        self._kind, self._choices, self._invalid = action, list(choices), invalid

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """Return the first observation; the row's columns are the options."""
        observation, _ = self._environment.reset(seed=seed, options=task)
        return _shown(observation)

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """Return the next observation and the turn's reward; done if terminated or truncated."""
        action = self._action(visible_text(text).strip())
        if action is None:
            return Step(self._invalid)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return Step(_shown(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _action(self, text: str) -> str | int | None:
        if self._kind == "text":
            return text
        if self._kind == "number":
            numbers = _NUMBER.findall(text)
            return int(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None
        positions = [(text.rfind(choice), number) for number, choice in enumerate(self._choices)]
        place, number = max(positions, default=(-1, 0))
        return number if place >= 0 else None


def _shown(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, default=lambda value: value.tolist())
