"""The built-in environments."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.agents.environment_registry import find_environment, names
from mrl.agents.envs.calculator import Calculator, calculator_rows
from mrl.agents.tool_calls import ToolCall, parse_tool_calls
from mrl.agents.tools.arithmetic_tool import value_of
from mrl.agents.tools.tool import ToolBox, ToolError, shorten


def test_every_shipped_environment_is_there() -> None:
    assert {"calculator", "python_maths"} <= set(names())
    for name in names():
        methods = ("run",) if name in ("harbor", "nemo_gym", "verifiers") else ("reset", "step", "close")
        assert all(hasattr(find_environment(name), method) for method in methods)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37*58", "2146"), (" 1/3+1/6 ", "1/2"), ("7//2 % 2", "1"), ("-(2-5)", "3"), ("0.1+0.2", "3/10")],
)
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert str(value_of(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1/0", "2**9", "x", "True", "f(1)", "1+", "[1]", "(" * 150, "9*" * 120 + "9", "1e999", "'a'", "\0"],
)
def test_what_is_no_expression_is_the_policys_mistake(expression: str) -> None:
    with pytest.raises(ToolError):
        value_of(expression)


def test_the_calculator_is_asked_and_then_answered() -> None:
    env = Calculator()
    assert env.reset({"expression": "37*58"}, 0) == ""
    turn = '<tool_call>{"name": "calculator", "arguments": {"expression": "37*58"}}</tool_call>'
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in env.tools}
    calls = [call for call in parse_tool_calls(turn, "hermes", schemas) if isinstance(call, ToolCall)]
    assert env.step(turn, calls).observation == [{"role": "tool", "content": "2146"}]
    end = env.step("37*58 = 2146", [])
    assert (end.reward, end.done, end.info) == (1.0, True, {"calls": 1})
    for wrong in ("2147", "", "2146 or 2147", "<think>2146</think>", "1/0"):
        assert env.step(wrong, []).reward == 0.0


def test_made_rows_are_the_same_each_time_and_differ() -> None:
    made = list(calculator_rows(500, seed=1, digits=3))
    assert (
        made == list(calculator_rows(500, seed=1, digits=3)) != list(calculator_rows(500, seed=2, digits=3))
    )
    assert len({row["expression"] for row in made}) == 500
    assert all(value_of(row["expression"]).denominator == 1 for row in made)


class Echo:
    name, description = "echo", "Says it again."
    parameters: dict[str, Any] = {"type": "object"}

    def run(self, text: str) -> str:
        if text == "wrong":
            raise ToolError("not that")
        if text == "broken":
            raise KeyError("ours")
        return text

    def close(self) -> None:
        """Nothing."""


def test_calls_are_carried_out_in_order_up_to_a_limit() -> None:
    box = ToolBox([Echo()], max_calls=3, max_chars=30)
    calls = [ToolCall("echo", {"text": text}) for text in ("a", "wrong", "x" * 31, "late", "later")]
    texts = [message["content"] for message in box.messages(calls)]
    assert texts[:2] == ["a", "error: not that"] and "1 of 31 characters left out" in texts[2]
    assert all("not carried out, a turn has at most 3 calls" in text for text in texts[3:])
    with pytest.raises(KeyError):
        box.messages([ToolCall("echo", {"text": "broken"})])


def test_a_cut_text_keeps_its_ends() -> None:
    text = "".join(chr(65 + n % 26) for n in range(1000))
    assert shorten(text, 90).startswith(text[:60]) and shorten(text, 90).endswith(text[-30:])
    assert shorten(text, 1000) == text
