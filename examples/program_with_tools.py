"""A program that calls the policy by OpenAI's client and runs a tool for it: arithmetic with a calculator.

    mrl train configs/calculator.yaml agent.environment=examples/program_with_tools.py:Calculate

needs the model of `make calculator`. The task is that of the environment `calculator`; here the program
decides when the model is called, and with what.
"""

from __future__ import annotations

import json
from typing import Any, cast

import openai

from mrl.agents.environment import Model
from mrl.agents.tools.arithmetic_tool import Arithmetic, value_of
from mrl.agents.tools.tool import ToolBox, ToolError


class Calculate:
    """Row: {"prompt": [...], "expression": "37*58"}. Reward 1 if the answer's last word is the value."""

    def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        client, tools = openai.OpenAI(), cast("Any", ToolBox([Arithmetic()]).schemas)
        messages = list(task["prompt"])
        for _ in range(3):
            answer = client.chat.completions.create(model=model.name, messages=messages, tools=tools)
            reply = answer.choices[0].message
            messages.append(reply.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            if not reply.tool_calls:
                return float((reply.content or "").split()[-1:] == [str(value_of(task["expression"]))])
            for call in cast("list[Any]", reply.tool_calls):
                try:
                    result = str(value_of(json.loads(call.function.arguments)["expression"]))
                except ToolError as error:
                    result = str(error)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0
