"""Conversations with tools in every family's template, by each API: the trained tokens are the engine's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mrl.agents.episode import Limits
from tests.mrl.gateway.served import Serve, Served, check_tokens
from tests.support import chat_tokenizers
from tests.support.family_templates import FORMS

CALL = '{"name": "add", "arguments": {"a": 2}}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LIMITS = Limits(max_turns=8, max_context=8000, max_tokens=8000, max_turn_tokens=400)

Send = Callable[[list[Any]], tuple[list[Any], str]]
"""Send all items; return those of the policy's turn, and its call's id."""


def chat(served: Served) -> Send:
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}

    def send(items: list[Any]) -> tuple[list[Any], str]:
        message = served.say(*items, tools=[tool])
        return [message.model_dump(exclude_none=True)], message.tool_calls[0].id if message.tool_calls else ""

    return send


def messages(served: Served) -> Send:
    def send(items: list[Any]) -> tuple[list[Any], str]:
        tool = {"name": "add", "input_schema": SCHEMA}
        reply = served.anthropic.messages.create(model="m", max_tokens=400, tools=[tool], messages=items)
        blocks = [block.model_dump(exclude_none=True) for block in reply.content]
        return [{"role": "assistant", "content": blocks}], blocks[-1].get("id", "")

    return send


def responses(served: Served) -> Send:
    def send(items: list[Any]) -> tuple[list[Any], str]:
        tool = {"type": "function", "name": "add", "parameters": SCHEMA}
        reply = served.openai.responses.create(model="m", tools=[tool], input=items)
        output = [item.model_dump(exclude_none=True) for item in reply.output]
        return output, output[-1].get("call_id", "")

    return send


def result(send: Callable[[Served], Send], call_id: str, *texts: str) -> list[Any]:
    """Return a tool's result, and in the same request a text of the user's, if there is one."""
    if send is messages:
        blocks: list[Any] = [{"type": "tool_result", "tool_use_id": call_id, "content": "4"}]
        return [{"role": "user", "content": blocks + [{"type": "text", "text": text} for text in texts]}]
    item = {"role": "tool", "tool_call_id": call_id, "content": "4"}
    if send is responses:
        item = {"type": "function_call_output", "call_id": call_id, "output": "4"}
    return [item, *({"role": "user", "content": text} for text in texts)]


ALL = {**FORMS, **{name: name for name in chat_tokenizers.ALL}}


@pytest.mark.parametrize("family", [pytest.param(form, id=name) for name, form in ALL.items()])
@pytest.mark.parametrize("api", [chat, messages, responses])
def test_a_program_with_tools_is_captured(family: Any, api: Callable[[Served], Send], serve: Serve) -> None:
    """A turn with thoughts and a call, its result, one with text of the user's, and a question.

    Templates that drop thoughts before a user's message start a conversation there, as they show it."""
    drops = not isinstance(family, str) and "<think>" in family.template
    says = iter([CALL, CALL, "it is 4", "bye"])

    def say(context: str) -> str:
        thought = "hm</think>" if context.rstrip().endswith("<think>") else "<think>hm</think>"
        return (thought if drops else "") + next(says)

    with serve(say, family=family, limits=LIMITS, tool_calls="json", show_tools="none") as served:
        send = api(served)
        items: list[Any] = [{"role": "user", "content": "2+2?"}]
        made, first = send(items)
        items += [*made, *result(api, first)]
        made, second = send(items)
        items += [*made, *result(api, second, "and so?")]
        made, none = send(items)
        items += [*made, {"role": "user", "content": "thanks"}]
        send(items)
        assert first and second and not none and json.loads(CALL)["name"] == "add"
        sample = served.sample()
        turns = [len(one.transcript.turns) for one in sample.sequences if one.transcript]
        assert turns == ([2, 1, 1] if drops else [4])
        check_tokens(sample, served.policy)
        last = served.policy._tokenizer.decode(served.policy.requests[3].prompt_tokens.tolist())
        assert all(text in last for text in ("2+2?", "and so?", "it is 4", "thanks"))
