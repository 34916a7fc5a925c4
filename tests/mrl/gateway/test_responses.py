"""OpenAI's responses, by its own client: histories, earlier responses by id, tools, streams, refusals."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from mrl.agents.episode import Limits
from tests.mrl.gateway.served import CALL, TOOL, Serve, check_tokens, numbered, user

FUNCTION = {"type": "function", **TOOL["function"]}


def adds(context: str) -> str:
    """Say what a policy says that thinks, calls a tool, and reads its result."""
    return "4" if "result: 4" in context else f"<think>hm</think>Let me add.\n{CALL}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_history_of_items_only_grows(stream: bool, serve: Serve) -> None:
    """As openai-agents and Codex send it: all items that they got, with reasoning, and store=False."""

    def respond(items: list[Any]) -> Any:
        options: dict[str, Any] = {"instructions": "Be brief.", "tools": [FUNCTION], "store": False}
        if not stream:
            return served.openai.responses.create(model="m", input=items, **options)
        with served.openai.responses.stream(model="m", input=items, **options) as events:
            kinds = [event.type for event in events]
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-1] == "response.completed"
            return events.get_final_response()

    with serve(adds) as served:
        items: list[Any] = [{"role": "developer", "content": "Add."}, user("2+2?")]
        first = respond(items)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output_text == "Let me add." and first.output[0].content[0].text == "hm"
        call = first.output[2]
        assert (call.name, call.arguments) == ("add", '{"a": 2}')
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "result: 4"})
        last = respond(items)
        assert last.output_text == "4" and last.status == "completed"
        assert last.usage.input_tokens == len(served.policy.requests[1].prompt_tokens)
        assert last.usage.output_tokens == len(served.session.conversations.turns[1].completion.tokens)
        context = served.policy._tokenizer.decode(served.policy.requests[0].prompt_tokens.tolist())
        assert context.count("system") == 2 and "Be brief.\n\nAdd." in context, "the tools', and one text"
        assert not served.sample().branches
        check_tokens(served.sample(), served.policy)


def test_a_response_continues_another_of_its_trajectory(serve: Serve) -> None:
    """Instructions are those of each request, as in OpenAI's API; a branch starts at any stored response."""
    with serve(numbered()) as served:
        create = served.openai.responses.create
        first = create(model="m", input="one", instructions="Be brief.")
        second = create(
            model="m", input="two", instructions="Be brief.", previous_response_id=first.id, store=False
        )
        create(model="m", input="other", instructions="Be brief.", previous_response_id=first.id)
        create(model="m", input="two", instructions="Be long.", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        turns = [
            [turn.text for turn in s.transcript.turns] for s in served.sample().sequences if s.transcript
        ]
        assert turns == [["turn 0", "turn 1"], ["turn 0", "turn 2"], ["turn 3"]]
        check_tokens(served.sample(), served.policy)
        for unknown in ("resp_x", second.id):
            with pytest.raises(openai.BadRequestError, match="not stored") as refused:
                create(model="m", input="three", previous_response_id=unknown)
            assert refused.value.code == "previous_response_not_found"


def test_a_turn_that_is_cut_is_incomplete_and_has_log_probs(serve: Serve) -> None:
    with serve(numbered(), limits=Limits(8, 60, 60, 50)) as served:
        cut = served.openai.responses.create(
            model="m", input="?", max_output_tokens=2, include=["message.output_text.logprobs"]
        )
        assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
        (part,) = cut.output[0].content
        completion = served.session.conversations.turns[0].completion
        assert [entry.logprob for entry in part.logprobs] == pytest.approx(completion.logprobs.tolist())
        with pytest.raises(openai.BadRequestError, match="maximum context length is 60") as refused:
            served.openai.responses.create(model="m", input="long " * 80)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tool_choice": "required", "tools": [FUNCTION]}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], field: str, serve: Serve) -> None:
    with serve(numbered()) as served, pytest.raises(openai.BadRequestError) as refused:
        served.openai.responses.create(**{"model": "m", "input": "?"} | options)
    assert refused.value.param == field and not served.policy.requests
