"""Anthropic's messages: requests read, replies written as a body or as events.

Thinking blocks of a history are dropped: the conversation's tokens have the thoughts. Fields that would
change sampling are ignored: the run decides it. https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.agents.tool_calls import ToolCall
from mrl.gateway.histories import ChatMessage, add_result
from mrl.gateway.openai_chat import MODEL, ChatOptions, malformed, read_count, read_text, unsupported_field
from mrl.gateway.session import RefusedRequest, Reply

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def read_messages_request(body: Mapping[str, Any]) -> ChatOptions:
    """Read a request's other fields. Raise RefusedRequest if they ask for what there is not."""
    if body.get("stop_sequences"):
        raise unsupported_field("stop_sequences", "the model's own end of turn ends a reply")
    choice = (body.get("tool_choice") or {"type": "auto"}).get("type")
    if choice not in ("auto", "none"):
        raise unsupported_field("tool_choice", "only auto and none")
    return ChatOptions(
        read_count(body.get("max_tokens"), "max_tokens"),
        bool(body.get("stream")),
        model=str(body.get("model") or MODEL),
        with_tools=choice != "none",
        system=_text(body.get("system"), "system"),
    )


def message_body(reply: Reply, request: ChatOptions, name: str) -> dict[str, Any]:
    """Return the answer's body."""
    return _head(reply, request, name) | {
        "content": _blocks(reply),
        "stop_reason": _stop(reply),
        "usage": _usage(reply, len(reply.turn.completion.tokens)),
    }


def message_events(reply: Reply, request: ChatOptions, name: str) -> Iterator[str]:
    """Return the answer as server-sent events. The reply is whole: each block has one delta."""
    head = _head(reply, request, name) | {"content": [], "stop_reason": None, "usage": _usage(reply, 0)}
    yield _event({"type": "message_start", "message": head})
    for index, block in enumerate(_blocks(reply)):
        for start, delta in _deltas(block):
            yield _event({"type": "content_block_start", "index": index, "content_block": start})
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    end = {"stop_reason": _stop(reply), "stop_sequence": None}
    usage = {"output_tokens": len(reply.turn.completion.tokens)}
    yield _event({"type": "message_delta", "delta": end, "usage": usage})
    yield _event({"type": "message_stop"})


def message_error(error: RefusedRequest) -> dict[str, Any]:
    """Return the body of a refusal."""
    reason = f"prompt is too long: {error}" if error.kind == "context_length_exceeded" else str(error)
    return {"type": "error", "error": {"type": _KINDS.get(error.status, "api_error"), "message": reason}}


def read_message(message: Any, messages: list[ChatMessage]) -> None:
    """Append a message to those before it: tool results are messages of their own.

    Raise RefusedRequest if it is malformed."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise malformed("messages", "a message must have the role user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        messages.append(ChatMessage(role, content))
        return
    if not isinstance(content, list):
        raise malformed("messages", "content must be text or a list of blocks")
    count, texts, calls = len(messages), list[str](), list[ToolCall]()
    for block in content:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(read_text([{"type": "text", "text": block.get("text")}]))
            case "tool_use" if role == "assistant":
                arguments = dict(block.get("input") or {})
                calls.append(ToolCall(str(block.get("name")), arguments, str(block.get("id") or "")))
            case "tool_result" if role == "user":
                text = _text(block.get("content"), "messages")
                add_result(text, str(block.get("tool_use_id") or ""), messages)
            case "thinking" | "redacted_thinking" if role == "assistant":
                pass
            case kind:
                raise unsupported_field(
                    "messages", f"no blocks of type {kind} in a message of the role {role}"
                )
    if texts or calls or len(messages) == count:
        messages.append(ChatMessage(role, "\n".join(texts), tuple(calls)))


def _text(content: Any, field: str) -> str:
    """Read text blocks, which may have further keys (cache_control)."""
    if isinstance(content, list):
        content = [
            {"type": block.get("type"), "text": block.get("text")} if isinstance(block, dict) else block
            for block in content
        ]
    return read_text(content, field)


def read_messages_tool(tool: Any) -> Mapping[str, Any]:
    """Read a tool's schema. Raise RefusedRequest if it has another form."""
    if (
        not isinstance(tool, dict)
        or not isinstance(tool.get("name"), str)
        or tool.get("type", "custom") != "custom"
    ):
        raise malformed("tools", 'a tool must be {"name", "description", "input_schema"}')
    if not isinstance(tool.get("input_schema") or {}, dict):
        raise malformed("tools", "the input_schema of a tool must be a JSON schema, an object")
    schema = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {key: value for key, value in schema.items() if value}}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.thought:
        blocks.append({"type": "thinking", "thinking": reply.thought, "signature": ""})
    if reply.message.text or not reply.message.calls:
        blocks.append({"type": "text", "text": reply.message.text, "citations": None})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in reply.message.calls
    ]


def _deltas(block: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    match block["type"]:
        case "thinking":
            yield dict(block) | {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        case "text":
            yield dict(block) | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        case _:
            text = json.dumps(block["input"], ensure_ascii=False)
            yield dict(block) | {"input": {}}, {"type": "input_json_delta", "partial_json": text}


def _stop(reply: Reply) -> str:
    return "max_tokens" if reply.is_cut else "tool_use" if reply.message.calls else "end_turn"


def _usage(reply: Reply, count: int) -> dict[str, int]:
    return {"input_tokens": reply.num_prompt_tokens, "output_tokens": count}


def _head(reply: Reply, request: ChatOptions, name: str) -> dict[str, Any]:
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "stop_sequence": None,
    }


def _event(data: Mapping[str, Any]) -> str:
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
