"""OpenAI's chat completions: requests read, replies written as a body or as events.

Fields that would change sampling are ignored: the run decides it. Those that a reply could not honour are
refused. https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mrl.agents.tool_calls import ToolCall
from mrl.gateway.histories import ChatMessage, add_result, add_system
from mrl.gateway.session import RefusedRequest, Reply

MODEL = "policy"
"""Name of the model; requests may use any."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclasses.dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a request of any API: all but its messages and tools."""

    max_tokens: int | None = None
    stream: bool = False
    with_usage: bool = False
    """Stream the token counts too."""
    with_logprobs: bool = False
    model: str = MODEL
    with_tools: bool = True
    """The policy may call the request's tools."""
    system: str = ""
    """Text before the messages."""
    previous: str = ""
    """Id of the response that the messages follow; empty: they are the whole history."""
    is_stored: bool = False
    """Later requests may name the response."""


def read_chat(body: Mapping[str, Any]) -> ChatOptions:
    """Read a request's other fields. Raise RefusedRequest if they ask for what there is not."""
    if body.get("n") not in (None, 1):
        raise unsupported_field("n", "one reply per request")
    if body.get("stop"):
        raise unsupported_field("stop", "no stop texts: the model's own end of turn ends a reply")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise unsupported_field("tool_choice", "only auto and none")
    if body.get("response_format") not in (None, {"type": "text"}):
        raise unsupported_field("response_format", "only text")
    if body.get("logprobs") and body.get("top_logprobs"):
        raise unsupported_field("top_logprobs", "log-probs of the reply's own tokens only")
    options = body.get("stream_options") or {}
    return ChatOptions(
        read_count(body.get("max_completion_tokens", body.get("max_tokens")), "max_tokens"),
        bool(body.get("stream")),
        bool(options.get("include_usage")),
        bool(body.get("logprobs")),
        str(body.get("model") or MODEL),
        body.get("tool_choice") != "none",
    )


def chat_body(
    reply: Reply, request: ChatOptions, name: str, token_text: Callable[[int], str]
) -> dict[str, Any]:
    """Return the answer's body. `token_text`: text of a token, for log-probs."""
    text, calls = reply.message.text, reply.message.calls
    content = text if text or not calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reply.thought:
        message["reasoning_content"] = reply.thought
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    logprobs = _logprobs(reply, request, token_text)
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": _finish(reply)}
    return _head(name, request, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def chat_events(
    reply: Reply, request: ChatOptions, name: str, token_text: Callable[[int], str]
) -> Iterator[str]:
    """Return the answer as server-sent events. The reply is whole: each part is one event."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if reply.thought:
        deltas.append({"reasoning_content": reply.thought})
    if reply.message.text:
        deltas.append({"content": reply.message.text})
    deltas += [{"tool_calls": [{"index": n} | _call(call)]} for n, call in enumerate(reply.message.calls)]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": _finish(reply)})
    choices[-1]["logprobs"] = _logprobs(reply, request, token_text)
    head = _head(name, request, "chat.completion.chunk")
    for choice in choices:
        yield _event(head | {"choices": [choice]})
    if request.with_usage:
        yield _event(head | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def chat_error(error: RefusedRequest) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = "invalid_request_error" if error.status == 400 else error.kind
    fields = {"message": str(error), "type": kind, "param": error.field or None, "code": error.kind}
    return {"error": fields}


def models_body() -> dict[str, Any]:
    """Return the list of models, which both APIs read."""
    model = {"id": MODEL, "object": "model", "type": "model", "created": 0, "owned_by": "mrl"}
    model |= {"display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
    return {"object": "list", "data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL}


def malformed(field: str, reason: str) -> RefusedRequest:
    """Return the refusal of a body that is not valid."""
    return RefusedRequest(400, "invalid_request_error", reason, field)


def unsupported_field(field: str, offer: str) -> RefusedRequest:
    """Return the refusal of a field; `offer`: what is supported instead."""
    return RefusedRequest(400, "unsupported_value", f"{field} is not supported: {offer}", field)


def read_count(value: Any, field: str) -> int | None:
    """Read a positive number of tokens, or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise malformed(field, f"{field} must be a positive integer")
    return value


def read_tool(tool: Any) -> Mapping[str, Any]:
    """Read a tool's schema. Raise RefusedRequest if it has another form."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise malformed("tools", 'a tool must be {"type": "function", "function": {"name", ...}}')
    if not isinstance(function.get("parameters") or {}, dict):
        raise malformed("tools", "the parameters of a tool must be a JSON schema, an object")
    known = {key: function[key] for key in ("name", "description", "parameters") if function.get(key)}
    return {"type": "function", "function": known}


def read_text(content: Any, field: str = "messages") -> str:
    """Read a content of text or of text parts. Raise RefusedRequest for images and other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise malformed(field, "content must be text or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise unsupported_field(field, f"only parts of type text, not {kind}")
    return "\n".join(part["text"] for part in content)


def read_chat_message(message: Any, messages: list[ChatMessage]) -> None:
    """Append a message to those before it. Raise RefusedRequest if it is malformed."""
    role = ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
    if role is None:
        raise malformed("messages", f"a message must have one of the roles {', '.join(ROLES)}")
    text = read_text(message.get("content"))
    if role == "system":
        add_system(text, messages)
    elif role == "tool":
        add_result(text, str(message.get("tool_call_id") or ""), messages, str(message.get("name") or ""))
    else:
        calls = message.get("tool_calls") or [] if role == "assistant" else []
        messages.append(ChatMessage(role, text, tuple(map(read_past_call, calls))))  # type: ignore[arg-type]


def read_past_call(call: Any, field: str = "messages") -> ToolCall:
    """Read a call of a tool. Raise RefusedRequest if its arguments are not a JSON object."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise TypeError
        return ToolCall(str(function["name"]), arguments, str(call.get("id") or ""))
    except (KeyError, TypeError, ValueError) as error:
        reason = "a tool call must have the name of a function and its arguments, a JSON object"
        raise malformed(field, reason) from error


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def logprobs_of(reply: Reply, token_text: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return the log-probs of all tokens of a turn."""
    completion = reply.turn.completion
    pairs = zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True)
    entries = [(token_text(token), logprob) for token, logprob in pairs]
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in entries
    ]


def _logprobs(reply: Reply, request: ChatOptions, token_text: Callable[[int], str]) -> dict[str, Any] | None:
    return {"content": logprobs_of(reply, token_text), "refusal": None} if request.with_logprobs else None


def _finish(reply: Reply) -> str:
    return "length" if reply.is_cut else "tool_calls" if reply.message.calls else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    before, count = reply.num_prompt_tokens, len(reply.turn.completion.tokens)
    return {"prompt_tokens": before, "completion_tokens": count, "total_tokens": before + count}


def _head(name: str, request: ChatOptions, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": request.model}


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
