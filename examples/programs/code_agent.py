"""A code agent of smolagents, trained unchanged: it solves problems by Python, which smolagents interprets.

    mrl train configs/smollm2.yaml examples/programs/code_agent.yaml

needs the model and the rows of `make smollm2`, and the packages of `make programs`.
"""

from __future__ import annotations

from typing import Any

import smolagents
from smolagents.models import REMOVE_PARAMETER

from mrl.agents.environment import Model


class Solve:
    """Row: {"prompt": [...], "answer": "12"}. Reward 1 if the agent's final answer is the row's."""

    def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        policy = smolagents.OpenAIModel(
            model.name,
            api_base=model.openai_url,
            api_key=model.key,
            stop=REMOVE_PARAMETER,  # the end of the policy's turn ends a step
        )
        agent = smolagents.CodeAgent([], policy, max_steps=4, verbosity_level=smolagents.LogLevel.OFF)
        answer = agent.run(task["prompt"][-1]["content"])
        return float(str(answer).strip() == str(task["answer"]).strip())
