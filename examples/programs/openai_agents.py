"""An agent of the OpenAI Agents SDK, trained unchanged: products, with a calculator as its tool.

    mrl train configs/calculator.yaml examples/programs/openai_agents.yaml

needs the model of `make calculator`, and the packages of `make programs`.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

import agents

from mrl.agents.environment import Model

agents.set_tracing_disabled(True)  # traces would go to OpenAI
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@agents.function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly."""
    match ast.parse(expression, mode="eval").body:
        case ast.BinOp(ast.Constant(int(left)), op, ast.Constant(int(right))) if type(op) in OPERATORS:
            return str(OPERATORS[type(op)](left, right))
    raise ValueError(f"{expression} is not the sum, difference or product of two numbers")


class Calculate:
    """Row: {"prompt": [...], "expression": "37*58"}. Reward 1 if the answer's last word is the value."""

    async def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        agent = agents.Agent(name="calculate", model=model.name, tools=[calculator])
        result = await agents.Runner.run(agent, task["prompt"], max_turns=3)
        left, right = map(int, task["expression"].split("*"))
        return float(str(result.final_output).split()[-1:] == [str(left * right)])
