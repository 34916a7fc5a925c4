"""Calls are read literally; a bad call gets a reason that the policy can read."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mrl.agents.tool_calls import BadCall, ToolCall, parse_tool_calls

TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "say": {"type": "object", "properties": {"text": {"type": "string"}}},
}
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def _hermes(*bodies: str) -> str:
    return "I ask.\n" + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def test_calls_in_order() -> None:
    say = '{"name": "say", "arguments": {"text": "</think> \\"x\\" }{"}}'
    assert parse_tool_calls(_hermes(ADD, ADD.replace("1", "7")), "hermes", TOOLS) == [
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("add", {"a": 7, "b": 2}),
    ]
    assert parse_tool_calls(f"[{ADD}, {ADD}]", "json", TOOLS) == 2 * [ToolCall("add", {"a": 1, "b": 2})]
    assert parse_tool_calls(_hermes(say.replace("</think> ", "")), "hermes", TOOLS) == [
        ToolCall("say", {"text": '"x" }{'})
    ]


@pytest.mark.parametrize("format", ["hermes", "json"])
@pytest.mark.parametrize(
    "text", ["the answer is 17", "", f"<think>{_hermes(ADD)}", f"<think>{ADD}</think> done"]
)
def test_text_without_a_call_makes_none(text: str, format: Any) -> None:
    assert parse_tool_calls(text, format, TOOLS) == []


def test_a_call_behind_a_thought_counts_and_one_inside_does_not() -> None:
    thought = f"<think>{_hermes(ADD)}</think>"
    assert parse_tool_calls(thought + "no", "hermes", TOOLS) == []
    assert parse_tool_calls(thought + _hermes(ADD), "hermes", TOOLS) == [ToolCall("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("add(1, 2)", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "add", "arguments": {"a": NaN, "b": 1}}', "NaN is not a number"),
        ("[1]", 'an object with "name"'),
        ('{"arguments": {}}', 'an object with "name"'),
        ('{"name": 3}', 'an object with "name"'),
        ('{"name": "sub", "arguments": {}}', "no tool 'sub'; there are add, say"),
        ('{"name": "add", "arguments": "1, 2"}', "must be an object, not str"),
        ('{"name": "add", "arguments": {"a": 1}}', "'b' is a required property"),
        ('{"name": "add", "arguments": {"a": 1, "b": "2"}}', "wrong at b: '2' is not of type 'number'"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}', "'c' was unexpected"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2, "b": 3}}', "the key 'a' twice"),
        ('{"name": "add", "name": "say", "arguments": {}}', "the key 'name' twice"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}, "parameters": {}}', "give its arguments once"),
        ('{"name": "say", "args": {"text": "x"}}', "and not 'args'"),
        ('{"name": "add", "parameters": {"a": 1}}', "'b' is a required property"),
        ('{"name": "add", "arguments": {"a": 1e999, "b": 2}}', "a number that is too large"),
        ('{"name": "say", "arguments": {"text": "\\ud800"}}', "surrogates not allowed"),
        (f'{{"name": "say", "arguments": {{"x": {"[" * 900 + "]" * 900}}}}}', "deeper than 64"),
    ],
)
def test_what_cannot_be_carried_out(body: str, reason: str) -> None:
    (call,) = parse_tool_calls(_hermes(body), "hermes", TOOLS)
    assert isinstance(call, BadCall) and reason in call.reason and len(call.reason) < 500


def test_a_call_may_be_in_the_form_of_llama_or_of_mistral() -> None:
    llama = ADD.replace("arguments", "parameters")
    assert parse_tool_calls(llama, "json", TOOLS) == [ToolCall("add", {"a": 1, "b": 2})]
    mistral = f'[{ADD[:-1]}, "id": "9Ab3xYz01", "type": "function"}}]'
    assert parse_tool_calls(mistral, "json", TOOLS) == [ToolCall("add", {"a": 1, "b": 2}, "9Ab3xYz01")]


@pytest.mark.parametrize("format", ["hermes", "json"])
def test_a_turn_of_very_many_calls_is_one_bad_call(format: Any) -> None:
    """The answers would be longer than an environment's limit, which would be our fault."""
    for count in (64, 65):
        text = _hermes(*[ADD] * count) if format == "hermes" else f"[{','.join([ADD] * count)}]"
        calls = parse_tool_calls(text, format, TOOLS)
        assert len(calls) == (64 if count == 64 else 1) and isinstance(calls[0], BadCall) == (count == 65)


@pytest.mark.parametrize("items", ["[1, 1.0]", '[{"a": 1}, {"a": 1.0}]', "[[0], [0]]", '["x", 2, "x"]'])
def test_items_that_are_to_differ(items: str) -> None:
    tools = {"say": {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}}
    call = '{"name": "say", "arguments": {"all": %s}}'
    (bad_call,) = parse_tool_calls(call % items, "json", tools)
    assert isinstance(bad_call, BadCall) and "wrong at all: a list has an item twice" in bad_call.reason
    for others in ('[1, true, "1"]', '[0, false, null, [], {}, ""]', '[{"a": 1}, {"b": 1}]'):
        assert isinstance(parse_tool_calls(call % others, "json", tools)[0], ToolCall)


@pytest.mark.parametrize("text", ["<tool_call>" + ADD, ADD + "</tool_call>", _hermes(ADD) + "<tool_call>"])
def test_a_mark_without_its_other_half(text: str) -> None:
    assert isinstance(parse_tool_calls(text, "hermes", TOOLS)[-1], BadCall)


def test_random_calls_come_back() -> None:
    rng, letters = random.Random(0), 'a"\\\n{}[]<>/語👩\u200d👧 '
    for _ in range(300):
        texts = ["".join(rng.choices(letters, k=rng.randint(0, 12))) for _ in range(rng.randint(1, 3))]
        calls = [{"name": "say", "arguments": {"text": text}} for text in texts]
        response = _hermes(*(json.dumps(call, ensure_ascii=rng.random() < 0.5) for call in calls))
        assert parse_tool_calls(response, "hermes", TOOLS) == [
            ToolCall("say", {"text": text}) for text in texts
        ]
