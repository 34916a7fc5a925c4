"""OpenAI's responses: requests read, replies written as a body or as events.

Programs send the whole history, or the id of an earlier response of their trajectory. Reasoning items of a
history are dropped: the conversation's tokens have the thoughts. Fields that would change sampling are
ignored: the run decides it. https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mrl.gateway.histories import ChatMessage, add_result, add_system
from mrl.gateway.openai_chat import (
    MODEL,
    ROLES,
    ChatOptions,
    chat_error,
    logprobs_of,
    malformed,
    read_count,
    read_past_call,
    read_text,
    read_tool,
    unsupported_field,
)
from mrl.gateway.session import RefusedRequest, Reply

_REFUSED = {
    "background": "wait for the response, or stream it",
    "conversation": "send the history or previous_response_id",
    "prompt": "send instructions and input",
}
_PARTS = ("input_text", "output_text", "text", "refusal")
_LOGPROBS = "message.output_text.logprobs"


def read_response_request(body: Mapping[str, Any]) -> ChatOptions:
    """Read a request's other fields. Raise RefusedRequest if they ask for what there is not."""
    for field, offer in _REFUSED.items():
        if body.get(field):
            raise unsupported_field(field, offer)
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise unsupported_field("tool_choice", "only auto and none")
    if ((body.get("text") or {}).get("format") or {"type": "text"}).get("type") != "text":
        raise unsupported_field("text", "only the format text")
    if body.get("truncation") not in (None, "disabled"):
        raise unsupported_field("truncation", "a request that is too long gets context_length_exceeded")
    if body.get("top_logprobs"):
        raise unsupported_field("top_logprobs", "log-probs of the response's own tokens only")
    return ChatOptions(
        read_count(body.get("max_output_tokens"), "max_output_tokens"),
        bool(body.get("stream")),
        with_logprobs=_LOGPROBS in (body.get("include") or ()),
        model=str(body.get("model") or MODEL),
        with_tools=body.get("tool_choice") != "none",
        system=read_text(body.get("instructions"), "instructions"),
        previous=str(body.get("previous_response_id") or ""),
        is_stored=body.get("store") is not False,
    )


def response_body(
    reply: Reply, request: ChatOptions, name: str, token_text: Callable[[int], str]
) -> dict[str, Any]:
    """Return the answer's body. `token_text`: text of a token, for log-probs."""
    before, count = reply.num_prompt_tokens, len(reply.turn.completion.tokens)
    usage = {
        "input_tokens": before,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": count,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": before + count,
    }
    return _head(request, name) | {
        "status": "incomplete" if reply.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.is_cut else None,
        "output": response_items(reply, request, name, token_text),
        "usage": usage,
    }


def response_events(
    reply: Reply, request: ChatOptions, name: str, token_text: Callable[[int], str]
) -> Iterator[str]:
    """Return the answer as server-sent events. The reply is whole: each item has one delta."""
    for number, event in enumerate(_events(response_body(reply, request, name, token_text), request, name)):
        data = json.dumps(event | {"sequence_number": number}, ensure_ascii=False)
        yield f"event: {event['type']}\ndata: {data}\n\n"


def response_error(error: RefusedRequest) -> dict[str, Any]:
    """Return the body of a refusal."""
    return chat_error(error)


def response_id(name: str) -> str:
    """Return the id of the response with a turn's name."""
    return f"resp_{name}"


def read_item(item: Any, messages: list[ChatMessage]) -> None:
    """Add an item to the messages before it: items of one turn of the policy are one message.

    Raise RefusedRequest if it is malformed."""
    if isinstance(item, str):
        item = {"role": "user", "content": item}
    match (item.get("type") or "message") if isinstance(item, dict) else None:
        case "message":
            role, text = ROLES.get(str(item.get("role"))), _text(item.get("content"))
            if role in (None, "tool"):
                raise malformed("input", "a message must have the role system, developer, user or assistant")
            if role == "system":
                add_system(text, messages)
            else:
                messages.append(ChatMessage(role, text))  # type: ignore[arg-type]
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = read_past_call({"function": function, "id": item.get("call_id")}, "input")
            last = messages.pop() if messages and messages[-1].role == "assistant" else None
            turn = last or ChatMessage("assistant")
            messages.append(dataclasses.replace(turn, calls=(*turn.calls, call)))
        case "function_call_output":
            add_result(_text(item.get("output")), str(item.get("call_id") or ""), messages)
        case "reasoning":
            pass
        case kind:
            raise unsupported_field("input", f"no items of type {kind}")


def _text(content: Any) -> str:
    """Read a content of text or of text parts. Raise RefusedRequest for images and other parts."""
    if isinstance(content, list):
        content = [
            {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
            if isinstance(part, dict) and part.get("type") in _PARTS
            else part
            for part in content
        ]
    return read_text(content, "input")


def read_function(tool: Any) -> Mapping[str, Any]:
    """Read a tool's schema. Raise RefusedRequest if it is not a function."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise unsupported_field("tools", f"only tools of type function, not {kind}")
    return read_tool({"type": "function", "function": tool})


def response_items(
    reply: Reply, request: ChatOptions, name: str, token_text: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return the items of a turn, as a program sends them back."""
    items: list[dict[str, Any]] = []
    status = "incomplete" if reply.is_cut else "completed"
    if reply.thought:
        content = [{"type": "reasoning_text", "text": reply.thought}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if reply.message.text or not reply.message.calls:
        part: dict[str, Any] = {"type": "output_text", "text": reply.message.text, "annotations": []}
        part["logprobs"] = logprobs_of(reply, token_text) if request.with_logprobs else []
        items.append(
            {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [part]}
        )
    return items + [
        {
            "type": "function_call",
            "id": f"fc_{name}-{number}",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
            "status": status,
        }
        for number, call in enumerate(reply.message.calls)
    ]


def _events(body: dict[str, Any], request: ChatOptions, name: str) -> Iterator[dict[str, Any]]:
    started = _head(request, name) | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": index}
        opened = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": item | opened | {"status": "in_progress"},
        }
        if item["type"] == "function_call":
            arguments = {"arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"]} | place
            yield {"type": "response.function_call_arguments.done", "name": item["name"]} | place | arguments
        else:
            (part,) = item["content"]
            place |= {"content_index": 0}
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            event, text = f"response.{part['type']}", part["text"]
            yield {"type": "response.content_part.added", "part": part | {"text": ""}} | place
            yield {"type": f"{event}.delta", "delta": text} | place | logprobs
            yield {"type": f"{event}.done", "text": text} | place | logprobs
            yield {"type": "response.content_part.done", "part": part} | place
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _head(request: ChatOptions, name: str) -> dict[str, Any]:
    return {
        "id": response_id(name),
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": request.system or None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": request.previous or None,
        "store": request.is_stored,
        "temperature": None,
        "tool_choice": "auto" if request.with_tools else "none",
        "tools": [],
        "top_p": None,
    }
