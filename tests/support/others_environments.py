"""One game, the number of letters of a word, in the forms of other systems."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

FILE = f"{__file__}:"


class AgentInstance:
    """In OpenRLHF's form."""

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        self.turns = 0
        return {"observation": f"{states['observation']} You have two tries."}

    async def step(self, state: dict[str, Any]) -> dict[str, Any]:
        self.turns += 1
        right = state["action_text"] == state["label"]
        return {
            "rewards": torch.tensor(float(right)),
            "environment_feedback": f"seen {len(state['observation_text'])} letters",
            "done": right or self.turns == 2,
            "extra_logs": {"turns": torch.tensor(self.turns), "text": "left out"},
        }


class Walk:
    """In Gymnasium's form: steps on a line to its end."""

    def __init__(self, length: int = 3) -> None:
        self.length, self.closed = length, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        self.place = (options or {}).get("start", 0)
        return np.array([self.place]), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.place += 1 if action else -1
        return {"place": self.place}, np.float32(action), self.place >= self.length, self.place < -2, {}

    def close(self) -> None:
        self.closed = True
