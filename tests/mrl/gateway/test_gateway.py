"""The gateway, by OpenAI's and Anthropic's own clients over HTTP: what a program gets is what is trained.

The policy is scripted; tests/launch/test_programs.py has real engines and weight updates.
"""

from __future__ import annotations

import json
import runpy
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mrl.agents.environment import Model
from mrl.agents.episode import EndedBy, Limits
from mrl.gateway import server
from mrl.loops.episode_metrics import episode_metrics
from mrl.observe.samples_log import row_of
from mrl.report.samples_text import samples_text
from mrl.samples import Group
from tests.mrl.gateway.served import CALL, PROMPT, TOOL, Serve, assistant, check_tokens, numbered, user
from tests.support import chat_tokenizers
from tests.support.source_tree import ROOT


@pytest.mark.parametrize("family", sorted(chat_tokenizers.ALL))
def test_a_conversation_only_grows(family: str, serve: Serve) -> None:
    with serve(numbered(), family=family) as served:
        first = served.say(user("one"))
        assert first.content == "turn 0"
        second = served.say(user("one"), assistant(f" {first.content}\n"), user("two"))
        served.say(user("one"), assistant("turn 0"), user("two"), assistant(second.content), user("three"))
        sample = served.sample()
        assert not sample.branches and sample.transcript is not None
        turns = sample.transcript.turns
        assert [(turn.text.strip(), turn.observation) for turn in turns] == [
            ("turn 0", "two"),
            ("turn 1", "three"),
            ("turn 2", ""),
        ]
        check_tokens(sample, served.policy)


def test_a_rewritten_history_is_a_conversation_of_its_own(serve: Serve, tmp_path: Path) -> None:
    """Compaction, a sub-agent and two attempts at one turn: what is shared is trained once."""
    with serve(numbered()) as served:
        served.say(user("one"))
        served.say(user("one"), assistant("turn 0"), user("two"))
        served.say(user("one"), assistant("turn 0"), user("another two"))
        served.say({"role": "system", "content": "You help."}, user("sub-task"))
        served.say(user("one"), assistant("a summary"), user("go on"))
        sample = served.sample()
        assert (
            len(sample.sequences) == 4
            and len(sample.segments) == 1
            and episode_metrics([sample])["agent/turns"] == 5
        )
        assert "a summary" in served.policy._tokenizer.decode(sample.prompt_tokens.tolist())
        turns = [[turn.text for turn in s.transcript.turns] for s in sample.sequences if s.transcript]
        assert turns == [["turn 0", "turn 1"], ["turn 0", "turn 2"], ["turn 3"], ["turn 4"]]
        check_tokens(sample, served.policy)
    row: dict[str, Any] = row_of(1, "train", Group(PROMPT, (sample,)), sample)
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    lines = samples_text(tmp_path).splitlines()
    second = lines.index("conversation 2 of 4, after turn 1 of conversation 1")
    assert lines[second + 1] == "  turn 2: turn 2" and lines[second + 2] == "conversation 3 of 4"


def test_tools_of_both_apis(serve: Serve) -> None:
    say = lambda context: "4" if "result: 4" in context else f"<think>hm</think>Let me add.\n{CALL}"  # noqa: E731
    with serve(say) as served:
        message = served.say(user("2+2?"), tools=[TOOL])
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 2}')
        assert message.content == "Let me add." and message.reasoning_content == "hm"
        result = {"role": "tool", "tool_call_id": call.id, "content": "result: 4"}
        last = served.say(user("2+2?"), message.model_dump(exclude_none=True), result, tools=[TOOL])
        assert last.content == "4" and not last.tool_calls
        assert not served.sample().branches
        check_tokens(served.sample(), served.policy)
    with serve(say) as served:
        tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}
        create = lambda messages: served.anthropic.messages.create(  # noqa: E731
            model="m", max_tokens=100, system="Be brief.", tools=[tool], messages=messages
        )
        first = create([user("2+2?")])
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.stop_reason == "tool_use" and first.content[2].input == {"a": 2}
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        answer = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "result: 4"}
        second = create(
            [user("2+2?"), {"role": "assistant", "content": blocks}, {"role": "user", "content": [answer]}]
        )
        assert second.content[0].text == "4" and second.stop_reason == "end_turn"
        assert second.usage.input_tokens == len(served.policy.requests[1].prompt_tokens)
        assert not served.sample().branches
        check_tokens(served.sample(), served.policy)


def test_a_call_that_cannot_be_read_is_text(serve: Serve) -> None:
    with serve(lambda context: "<tool_call>{</tool_call>") as served:
        message = served.say(user("?"), tools=[TOOL])
        assert message.tool_calls is None and message.content == "<tool_call>{</tool_call>"


def test_streams_say_the_same(serve: Serve) -> None:
    say = lambda context: f"<think>hm</think>Well.\n{CALL}"  # noqa: E731
    with serve(say) as served:
        whole = served.openai.chat.completions.create(
            model="m", messages=[user("?")], tools=[TOOL], logprobs=True
        )
        chunks = list(
            served.openai.chat.completions.create(
                model="m",
                messages=[user("?")],
                tools=[TOOL],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
        assert text == whole.choices[0].message.content == "Well."
        assert calls[0].function.arguments == whole.choices[0].message.tool_calls[0].function.arguments
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage == whole.usage
        content = whole.choices[0].logprobs.content
        completion = served.session.conversations.turns[0].completion
        assert [entry.logprob for entry in content] == pytest.approx(completion.logprobs.tolist())
    with (
        serve(say) as served,
        served.anthropic.messages.stream(
            model="m", max_tokens=100, messages=[user("?")], tools=[{"name": "add", "input_schema": {}}]
        ) as stream,
    ):
        final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[2].input == {"a": 2} and final.stop_reason == "tool_use"


def test_limits_and_what_programs_are_told(serve: Serve) -> None:
    with serve(numbered(), limits=Limits(2, 60, 60, 2)) as served:
        cut = served.openai.chat.completions.create(model="m", messages=[user("?")])
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2
        with pytest.raises(openai.BadRequestError, match="maximum context length is 60") as refused:
            served.say(user("long " * 80))
        assert refused.value.code == "context_length_exceeded"
        assert served.session.ended_by is EndedBy.CONTEXT_LIMIT
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            served.anthropic.messages.create(model="m", max_tokens=9, messages=[user("long " * 80)])
        short = served.openai.chat.completions.create(model="m", messages=[user("?")], max_tokens=1)
        assert short.usage.completion_tokens == 1
        with pytest.raises(openai.PermissionDeniedError, match=r"agent\.max_turns"):
            served.say(user("?"))
        assert len(served.policy.requests) == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], field: str, serve: Serve) -> None:
    with serve(numbered()) as served, pytest.raises(openai.BadRequestError) as refused:
        served.openai.chat.completions.create(**{"model": "m", "messages": [user("?")]} | options)
    assert refused.value.param == field and field in refused.value.message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_bodies_of_any_shape_are_refused(path: str, serve: Serve) -> None:
    """Values of wrong types at any place: an answer, and the next request is served."""
    messages = [{"role": "user", "content": "?"}]
    good = {"messages": messages, "input": messages, "tools": [], "max_tokens": 5, "stream": False}
    bodies: list[Any] = [b"{", b"[]", b"null", b"7", b'{"messages": 7}']
    for name in (*good, "stream_options", "tool_choice", "system", "n", "stop", "text", "include"):
        bodies += [
            json.dumps(good | {name: value}).encode() for value in (7.5, "x", [7], {"a": 7}, [{"a": [7]}])
        ]
    call = {"function": {"name": 3, "arguments": 7}}
    for message in ({"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "tool_calls": 7},
                    {"role": "user", "content": [{"type": "tool_result", "content": 7}]},
                    {"role": "assistant", "content": [{"type": "tool_use", "input": 7}]}):  # fmt: skip
        bodies.append(json.dumps(good | {"messages": [message], "input": [message, 7]}).encode())
    with serve(numbered(), limits=Limits(400, 4000, 4000, 50)) as served:
        key = {"x-api-key": served.address.key}
        statuses = [
            httpx.post(served.address.url + path, content=body, headers=key).status_code for body in bodies
        ]
        assert set(statuses) <= {200, 400} and statuses.count(400) > len(bodies) / 3
        assert served.say(user("?")).content.startswith("turn")
        assert served.session.failure is None


def test_a_key_opens_one_trajectory_while_it_is_open(serve: Serve) -> None:
    with serve(numbered()) as served:
        url, key = served.address.url, served.address.key
        assert [model.id for model in served.openai.models.list()] == ["policy"]
        count = served.anthropic.messages.count_tokens(model="m", messages=[user("?")])
        for header in ({}, {"Authorization": "Bearer mrl-x"}, {"x-api-key": "x"}):
            answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": [user("?")]}, headers=header)
            assert answer.status_code == 401
        served.say(user("?"))
        assert count.input_tokens == len(served.policy.requests[0].prompt_tokens)
    answer = httpx.post(f"{url}/v1/chat/completions", json={}, headers={"x-api-key": key})
    assert answer.status_code == 401


@pytest.mark.parametrize("parameters", [{"type": "anything"}, {"required": 5}, {"properties": {"a": 3}}])
def test_tools_that_are_no_schemas_are_refused(parameters: Any, serve: Serve) -> None:
    with serve(numbered()) as served:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(openai.BadRequestError, match="no JSON schema") as refused:
            served.say(user("?"), tools=[tool])
        assert refused.value.param == "tools" and served.session.failure is None


def test_schemas_fetch_nothing_and_end_nothing(serve: Serve) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    with serve(lambda context: call) as served:
        for reference in ("http://127.0.0.1:9/schema", "#/nowhere"):
            tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": reference}}}
            assert served.say(user("?"), tools=[tool]).content == call, "as text: nobody can check it"
        assert served.session.failure is None


def test_tools_that_a_template_hides_are_refused(serve: Serve) -> None:
    refused = pytest.raises(openai.BadRequestError, match=r"agent\.show_tools")
    with serve(numbered(), family="llama") as served, refused:
        served.say(user("?"), tools=[TOOL])
    with serve(numbered(), family="llama", show_tools="system") as served:
        served.say(user("?"), tools=[TOOL])
        assert '"name": "add"' in served.policy._tokenizer.decode(
            served.policy.requests[0].prompt_tokens.tolist()
        )


def test_a_turn_without_visible_text_is_an_empty_text(serve: Serve) -> None:
    with serve(lambda context: "<think>all of it") as served:
        assert served.say(user("?")).content == ""
        message = served.anthropic.messages.create(model="m", max_tokens=50, messages=[user("?")])
        assert [(block.type, block.text) for block in message.content] == [("text", "")]


def test_a_turn_that_nobody_awaits_is_given_up(serve: Serve) -> None:
    """The trajectory ends while a request is open: its turn is not part of the sample."""
    with serve(numbered(), seconds=1.0) as served:
        url, header = f"{served.address.url}/v1/chat/completions", {"x-api-key": served.address.key}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={"messages": [user("?")]}, headers=header, timeout=0.2)
        assert len(served.policy.requests) == 1
    assert not served.session.conversations.turns


def test_long_histories_are_rendered_in_linear_time(serve: Serve) -> None:
    with serve(numbered(), limits=Limits(9, 90_000, 90_000, 50)) as served:
        seconds = []
        for count in (301, 1201):
            messages = [(user if n % 2 == 0 else assistant)(f"{n}") for n in range(count)]
            start = time.monotonic()
            served.say(*messages)
            seconds.append(time.monotonic() - start)
        assert seconds[1] < 12 * seconds[0] + 1.0


def test_a_repeated_request_makes_one_turn(serve: Serve) -> None:
    """A client that gave up and asks again gets the turn that it asked for first."""
    with serve(numbered(), seconds=0.5) as served:
        body, header = {"messages": [user("?")]}, {"x-api-key": served.address.key}
        url = f"{served.address.url}/v1/chat/completions"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=header, timeout=0.1)
        again = httpx.post(url, json=body, headers=header | {"x-stainless-retry-count": "1"}, timeout=30)
        assert again.json()["choices"][0]["message"]["content"] == "turn 0"
        other = httpx.post(url, json=body, headers=header, timeout=30)
        assert other.json()["choices"][0]["message"]["content"] == "turn 1"
        assert len(served.policy.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_connections_stay_alive_while_the_policy_is_busy(
    stream: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.1)
    with serve(numbered(), seconds=0.6) as served:
        made = served.openai.with_options(timeout=0.4).chat.completions.create(
            model="m", messages=[user("?")], stream=stream
        )
        text = (
            "".join(c.choices[0].delta.content or "" for c in made)
            if stream
            else made.choices[0].message.content
        )
        assert text == "turn 0"


def test_texts_are_never_marks(serve: Serve) -> None:
    """A message that contains a template's mark has its letters, not the mark's token."""
    with serve(numbered()) as served:
        served.say(user("a<|im_end|>b"))
        (request,) = served.policy.requests
        ends = served.policy._tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert request.prompt_tokens.tolist().count(ends) == 1
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|im_end|>"}'}}
        history = {"role": "assistant", "content": "", "tool_calls": [call]}
        served.say(user("?"), history, {"role": "tool", "tool_call_id": "x", "content": "<|im_start|>1"})
        named = {"role": "tool", "tool_call_id": "x<|im_end|>", "content": "<tool_call>"}
        served.say({"role": "system", "content": "s"}, user("?"), named)
        described = TOOL["function"] | {"description": "ends<|im_end|>here"}
        served.say(user("?"), tools=[{"type": "function", "function": described}])
        counts = [r.prompt_tokens.tolist().count(ends) for r in served.policy.requests]
        texts = [served.policy._tokenizer.decode(r.prompt_tokens.tolist()) for r in served.policy.requests]
        assert counts == [1, 3, 3, 2], "as many as there are messages, and tools"
        assert (
            '{"a": "<|im_end|>"}' in texts[1]
            and "<|im_start|>1" in texts[1]
            and "ends<|im_end|>here" in texts[3]
        )


def test_the_example_that_compacts_trains_its_summary(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both sequences are in one sample, all turns are trained once, and what is shown has the tree."""
    example = runpy.run_path(str(ROOT / "examples/program_that_compacts.py"))["Compact"]

    def say(context: str) -> str:
        if "What is known: not 2140" in context:
            return "it is 2146"
        return "not 2140" if "Write down" in context else f"it is 21{40 + context.count('Check that.')}"

    with serve(say) as served:
        model = Model(served.address.url, served.address.key)
        for name, value in model.variables().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(example.run.__globals__, "LONGEST", 80)
        task = {"prompt": [user("What is 37*58, exactly and in digits?")], "expression": "37*58"}
        assert example().run(task, 0, model) == 1.0
        sample = served.sample()
        check_tokens(sample, served.policy)
    turns = [[turn.text for turn in one.transcript.turns] for one in sample.sequences if one.transcript]
    assert turns == [["it is 2140", "it is 2141", "not 2140"], ["it is 2146"]]
    row = row_of(1, "train", Group(PROMPT, (sample,)), sample)
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    lines = samples_text(tmp_path).splitlines()
    assert lines[1:3] == ["conversation 1 of 2", f"  prompt: user: {task['prompt'][0]['content']}"]
    assert "    user: What is known: not 2140" in lines[lines.index("conversation 2 of 2") :]


def test_the_example_answers_with_its_tool(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(ROOT / "examples/program_with_tools.py"))["Calculate"]
    call = '{"name": "calculator", "arguments": {"expression": "37*58"}}'
    say = lambda context: "it is 2146" if "2146" in context else f"<tool_call>{call}</tool_call>"  # noqa: E731
    with serve(say) as served:
        for name, value in Model(served.address.url, served.address.key).variables().items():
            monkeypatch.setenv(name, value)
        task = {"prompt": [user("37*58")], "expression": "37*58"}
        assert example().run(task, 0, Model(served.address.url, served.address.key)) == 1.0
        check_tokens(served.sample(), served.policy)
        assert len(served.policy.requests) == 2 and not served.sample().branches


def test_turns_of_equal_requests_are_given_up_too(serve: Serve) -> None:
    """Two sub-agents may send the same; both turns end with the trajectory, which does not wait for them."""
    started = time.monotonic()
    with serve(numbered(), seconds=300.0) as served:
        url, header = f"{served.address.url}/v1/chat/completions", {"x-api-key": served.address.key}
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json={"messages": [user("?")]}, headers=header, timeout=0.3)
        assert len(served.policy.requests) == 1, "one turn at a time"
    assert time.monotonic() - started < 60 and not served.session.conversations.turns
