"""The environments that come with the project, each by its own rules."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from mrl.agents.environment import Step
from mrl.agents.environment_registry import find_environment, names
from mrl.agents.envs.calculator import Calculator, calculator_rows
from mrl.agents.tool_calls import ToolCall, calls_in
from mrl.agents.tools.arithmetic_tool import value_of
from mrl.agents.tools.tool import ToolBox, ToolError, shorten
from tests.support.guess import Guess


def test_every_shipped_environment_is_there() -> None:
    assert {"calculator", "python_maths"} <= set(names())
    for name in names():
        assert all(hasattr(find_environment(name), method) for method in ("reset", "step", "close"))


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
    calls = [call for call in calls_in(turn, "hermes", schemas) if isinstance(call, ToolCall)]
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


def played(env: Guess, *turns: str) -> list[Step]:
    env.reset({}, 5)
    return [asyncio.run(env.step(turn, [])) for turn in turns]


def halving(env: Guess) -> list[Step]:
    env.reset({}, 5)
    low, high, steps = 1, 64, []
    while not steps or not steps[-1].done:
        middle = (low + high) // 2
        steps.append(asyncio.run(env.step(f"is it {middle}", [])))
        low, high = (middle + 1, high) if steps[-1].observation == "higher" else (low, middle - 1)
    return steps


def test_turn_rewards_add_up_to_the_outcome() -> None:
    steps = halving(Guess(64))
    assert steps[-1].info == {"found": True} and len(steps) > 1
    assert sum(step.reward or 0.0 for step in steps) == pytest.approx(1.0)
    assert all((step.reward or 0.0) >= 0.0 for step in steps)
    outcome = halving(Guess(64, turn_rewards=False))
    assert [step.reward for step in outcome] == [0.0] * (len(outcome) - 1) + [1.0]


def test_a_turn_without_news_is_worth_nothing_and_turns_end() -> None:
    steps = played(Guess(64, tries=4), "no idea", "1000", "-3", "9" * 50)
    assert [step.reward for step in steps] == [0.0] * 4
    assert steps[0].observation == "Say a number." and steps[1].observation == "lower"
    assert [step.done for step in steps] == [False, False, False, True]


@pytest.mark.parametrize(
    ("seconds", "bounds"), [((0.5, 4.0), (0.5, 4.0)), (2.0, (0.0, math.inf)), (0.0, (0.0, 0.0))]
)
def test_answers_wait_as_they_are_told_to(seconds, bounds, monkeypatch) -> None:
    waits: list[float] = []

    async def slept(delay: float) -> None:
        waits.append(delay)

    monkeypatch.setattr(asyncio, "sleep", slept)
    played(Guess(64, seconds=seconds, tries=500), *["64"] * 400)
    assert len(waits) == 400 and min(waits) >= bounds[0] and max(waits) <= bounds[1]
    middle = sum(bounds) / 2 if bounds[1] < math.inf else seconds
    assert sum(waits) / 400 == pytest.approx(middle, rel=0.2)


class Echo:
    """A tool that says what it was given, or fails."""

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
    said = [message["content"] for message in box.messages(calls)]
    assert said[:2] == ["a", "error: not that"] and "1 of 31 characters left out" in said[2]
    assert all("not carried out, a turn has at most 3 calls" in text for text in said[3:])
    with pytest.raises(KeyError):
        box.messages([ToolCall("echo", {"text": "broken"})])


def test_a_cut_text_keeps_its_ends() -> None:
    text = "".join(chr(65 + n % 26) for n in range(1000))
    assert shorten(text, 90).startswith(text[:60]) and shorten(text, 90).endswith(text[-30:])
    assert shorten(text, 1000) == text
