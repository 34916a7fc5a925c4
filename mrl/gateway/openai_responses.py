"""OpenAI's responses: request bodies read, replies written as a body or as events.

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

from mrl.gateway.conversations import ChatMessage
from mrl.gateway.openai_chat import (
    MODEL,
    ROLES,
    ChatRequest,
    chat_error,
    logprobs_of,
    malformed,
    read_call,
    read_count,
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


def read_response_request(body: Any) -> ChatRequest:
    """Read a request's body. Raise RefusedRequest if it is malformed or asks for what there is not."""
    if not isinstance(body, dict):
        raise malformed("", "the body must be a JSON object")
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
    messages = _messages(body.get("input"))
    previous = body.get("previous_response_id") or ""
    if not messages and not previous:
        raise malformed("input", "input must be text or a list with at least one item")
    tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
    return ChatRequest(
        messages,
        tuple(_tool(tool) for tool in tools),
        read_count(body.get("max_output_tokens"), "max_output_tokens"),
        bool(body.get("stream")),
        with_logprobs=_LOGPROBS in (body.get("include") or ()),
        model=str(body.get("model") or MODEL),
        instructions=read_text(body.get("instructions"), "instructions"),
        previous=str(previous),
        is_stored=body.get("store") is not False,
    )


def response_body(
    reply: Reply, request: ChatRequest, name: str, token_text: Callable[[int], str]
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
        "output": _items(reply, request, name, token_text),
        "usage": usage,
    }


def response_events(
    reply: Reply, request: ChatRequest, name: str, token_text: Callable[[int], str]
) -> Iterator[str]:
    """Return the answer as server-sent events. The reply is whole: each item has one delta."""
    for number, event in enumerate(_events(response_body(reply, request, name, token_text), request, name)):
        data = json.dumps(event | {"sequence_number": number}, ensure_ascii=False)
        yield f"event: {event['type']}\ndata: {data}\n\n"


def response_error(error: RefusedRequest) -> dict[str, Any]:
    """Return the body of a refusal."""
    return chat_error(error)


def with_earlier(request: ChatRequest, stored: Mapping[str, tuple[ChatMessage, ...]]) -> ChatRequest:
    """Return a request with the messages of the response that it continues.

    Raise RefusedRequest if the trajectory has no such response."""
    if not request.previous:
        return request
    if request.previous not in stored:
        reason = (
            f"response {request.previous!r} is not of this trajectory, or was not stored; send the history"
        )
        raise RefusedRequest(400, "previous_response_not_found", reason, "previous_response_id")
    return dataclasses.replace(request, messages=(*stored[request.previous], *request.messages))


def response_id(name: str) -> str:
    """Return the id of the response with a turn's name."""
    return f"resp_{name}"


def _messages(items: Any) -> tuple[ChatMessage, ...]:
    """Read a request's input: items of one turn of the policy are one message."""
    if isinstance(items, str):
        return (ChatMessage("user", items),)
    if not isinstance(items, list):
        raise malformed("input", "input must be text or a list of items")
    messages = list[ChatMessage]()
    for item in items:
        match (item.get("type") or "message") if isinstance(item, dict) else None:
            case "message":
                role = ROLES.get(str(item.get("role")))
                if role in (None, "tool"):
                    raise malformed(
                        "input", "a message must have the role system, developer, user or assistant"
                    )
                messages.append(ChatMessage(role, _text(item.get("content"))))  # type: ignore[arg-type]
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = read_call({"function": function, "id": item.get("call_id")}, "input")
                last = messages.pop() if messages and messages[-1].role == "assistant" else None
                turn = last or ChatMessage("assistant")
                messages.append(dataclasses.replace(turn, calls=(*turn.calls, call)))
            case "function_call_output":
                text = _text(item.get("output"))
                messages.append(ChatMessage("tool", text, (), str(item.get("call_id") or "")))
            case "reasoning":
                pass
            case kind:
                raise unsupported_field("input", f"no items of type {kind}")
    return tuple(messages)


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


def _tool(tool: Any) -> Mapping[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise unsupported_field("tools", f"only tools of type function, not {kind}")
    return read_tool({"type": "function", "function": tool})


def _items(
    reply: Reply, request: ChatRequest, name: str, token_text: Callable[[int], str]
) -> list[dict[str, Any]]:
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


def _events(body: dict[str, Any], request: ChatRequest, name: str) -> Iterator[dict[str, Any]]:
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


def _head(request: ChatRequest, name: str) -> dict[str, Any]:
    tools = [
        {"type": "function", "strict": None, "parameters": None} | tool["function"] for tool in request.tools
    ]
    return {
        "id": response_id(name),
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions or None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": request.previous or None,
        "store": request.is_stored,
        "temperature": None,
        "tool_choice": "auto" if tools else "none",
        "tools": tools,
        "top_p": None,
    }
