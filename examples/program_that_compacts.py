"""A program that summarises its own history when that gets long. The summary is trained too.

    mrl train configs/calculator.yaml agent.environment=examples/program_that_compacts.py:Compact

needs the model of `make calculator`. Each start from a summary is a conversation of its own; one sample has
them all, with one reward. `mrl samples RUN` and the report show them.
"""

from __future__ import annotations

from typing import Any, cast

import openai

from mrl.agents.environment import Model
from mrl.agents.tools.arithmetic_tool import value_of

LONGEST = 60  # tokens; more start a summary
SUMMARISE: Any = {"role": "user", "content": "Write down what is known, for someone who saw nothing of this."}


class Compact:
    """Row: {"prompt": [...], "expression": "37*58"}. Reward 1 if an answer's last word is the value."""

    def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        client, value = openai.OpenAI(), str(value_of(task["expression"]))
        messages: list[Any] = list(task["prompt"])
        for _ in range(3):
            answer = client.chat.completions.create(model=model.name, messages=messages)
            text = answer.choices[0].message.content or ""
            if text.split()[-1:] == [value]:
                return 1.0
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Check that."}]
            if cast("Any", answer.usage).total_tokens > LONGEST:
                summary = client.chat.completions.create(
                    model=model.name, messages=[*messages[:-1], SUMMARISE]
                )
                known = f"What is known: {summary.choices[0].message.content}"
                messages = [*task["prompt"], {"role": "user", "content": known}]
        return 0.0
