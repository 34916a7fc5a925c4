"""Check a row's messages, tools and template arguments. Every key of a message reaches the chat template.

Three things are converted to the form that templates expect; everything else passes unchanged.

- JSON text (of messages, tools, tool_calls, the arguments of a call) is parsed: templates expect objects, and
  vLLM's server also passes objects.
- Content in parts of type "text" is joined by newlines, as vLLM does for templates that read text.
- Arrow gives every row all fields that any row has. Null fields are dropped, as in TRL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.sections.data import RESERVED_ARGUMENTS
from mrl.data.templates import JsonText
from mrl.errors import DataError

Messages = tuple[dict[str, Any], ...]

_PRINTED = re.compile(r"\s*(array\()?\[\s*\{\s*['\"](role|content)['\"]\s*:")


def read_text_or_messages(value: Any, *, name: str, place: str) -> str | Messages:
    """Return messages if column `name` contains a list, or JSON text of one; any other text unchanged.

    Raises DataError as `read_messages` does, and for messages as Python prints them, which csv writers leave.
    """
    parsed = _parsed(value)
    if not isinstance(value, str) or _are_messages(parsed):
        return read_messages(parsed, name=name, place=place)
    if parsed is value and _PRINTED.match(value) and value.rstrip().endswith(("]", ")")):
        raise DataError(
            f"{place}: column {name!r} contains messages as Python prints them, not JSON: {value[:80]!r}; "
            "write it with json.dumps"
        )
    return value


def read_messages(value: Any, *, name: str, place: str) -> Messages:
    """Return the messages of column `name`. Raises DataError if one is malformed or is not text."""
    value = _parsed(value)
    wrong = f"{place}: column {name!r} must be text or a list of {{role, content}}"
    if not isinstance(value, list) or not value:
        raise DataError(f"{wrong}, not {type(value).__name__} {str(value)[:80]!r}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{wrong}; one message is {str(message)[:80]!r}")
    return tuple(_message(message, wrong, place) for message in value)


def read_tools(value: Any, *, place: str) -> list[dict[str, Any]] | None:
    """Return tools as JSON schemas, None if the row has none; the list or its elements may be JSON text."""
    value = _parsed(value)
    if value is None:
        return None
    tools = [_parsed(tool) for tool in value] if isinstance(value, list) else None
    if tools is None or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{place}: tools must be a list of JSON schemas, not {str(value)[:80]!r}")
    return tools


def read_template_arguments(value: Any, *, place: str) -> dict[str, Any]:
    """Return further arguments of the chat template, an object or JSON text; empty if the row has none."""
    value = _parsed(value)
    if value is None:
        return {}
    if not isinstance(value, dict) or not RESERVED_ARGUMENTS.isdisjoint(value):
        raise DataError(
            f"{place}: chat_template_kwargs must be an object of template arguments other than "
            f"{', '.join(sorted(RESERVED_ARGUMENTS))}, not {str(value)[:80]!r}"
        )
    return value


def with_system(messages: Sequence[Mapping[str, Any]], text: str) -> Messages:
    """Append a text to the system message, or add a system message with it."""
    if not text:
        return tuple(dict(message) for message in messages)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return (first, *(dict(message) for message in messages[1:]))
    return ({"role": "system", "content": text}, *(dict(message) for message in messages))


def without_nulls(value: Any) -> Any:
    """Drop the null fields of objects, at any depth; null elements of lists stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _message(message: dict[str, Any], wrong: str, place: str) -> dict[str, Any]:
    content, calls = message.get("content"), _parsed(message.get("tool_calls"))
    changed: dict[str, Any] = {}
    if isinstance(content, list):
        changed["content"] = "\n".join(_text(part, place) for part in content)
    elif not isinstance(content, str) and not (content is None and calls):
        raise DataError(f"{wrong}; the content of a message is {str(content)[:80]!r}")
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call) for call in calls]
    return {**message, **changed}


def _are_messages(parsed: Any) -> bool:
    """Return True if JSON text was one message or several."""
    if isinstance(parsed, dict):
        return {"role", "content"} <= parsed.keys()
    return (
        isinstance(parsed, list) and bool(parsed) and all(isinstance(m, dict) and "role" in m for m in parsed)
    )


def _text(part: Any, place: str) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise DataError(
            f"{place}: a message has a content part of type {kind!r}; only parts of type 'text' are "
            "supported, because the models trained here read only text"
        )
    if further := sorted(key for key in part.keys() - {"type", "text"} if part[key] is not None):
        raise DataError(
            f"{place}: a text part of a message also has {further}, which nothing reads; remove it"
        )
    return part["text"]


def _call(call: Any) -> Any:
    """Parse the arguments of a tool call into an object; text that is not a JSON object stays text."""
    function = call.get("function") if isinstance(call, dict) else None
    json_text = function.get("arguments") if isinstance(function, dict) else None
    arguments = _parsed(json_text)
    if function is None or not isinstance(json_text, str) or not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": JsonText(arguments, json_text)}}


def _parsed(value: Any) -> Any:
    """Parse JSON text of an object or list; return anything else unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
