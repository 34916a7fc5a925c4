"""The tool calls of a policy's turn, read out of its text.

| format | a call |
|---|---|
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several one after the other (Qwen, Hermes) |
| json | the whole visible text is one such object, or a list of them |

Nothing is repaired or guessed: a call that cannot be read is the policy's mistake, and told to it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import jsonschema

from mrl.rewards.visible import visible_text

Format = Literal["hermes", "json"]

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPENS = re.compile(r"</?tool_call>")
_SHOWN = 200


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that can be carried out."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class BadCall:
    """What cannot, and why, in words for the policy."""

    reason: str


def calls_in(
    response: str, format: Format, tools: Mapping[str, Mapping[str, Any]]
) -> list[ToolCall | BadCall]:
    """The calls of a turn, in order; none where it makes none.

    `tools`: the JSON schema of each tool's arguments, by the tool's name. Only what stands behind the last closed thought
    counts; a call inside an unclosed one is none.
    """
    text = visible_text(response)
    if format == "json":
        return _whole(text, tools)
    bodies = _HERMES.findall(text)
    found = [_call(body, tools) for body in bodies]
    if _OPENS.search(_HERMES.sub("", text)):
        found.append(BadCall("a <tool_call> that is opened and not closed, or closed and not opened"))
    return found


def _whole(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[ToolCall | BadCall]:
    text = text.strip()
    if not text.startswith(("{", "[")):
        return []
    value = _json(text)
    if isinstance(value, BadCall):
        return [value]
    return [_checked(item, tools) for item in (value if isinstance(value, list) else [value])]


def _call(body: str, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | BadCall:
    value = _json(body.strip())
    return value if isinstance(value, BadCall) else _checked(value, tools)


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is no JSON ({str(error)[:_SHOWN]})")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _checked(value: Any, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | BadCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call is an object with "name" and "arguments"')
    name, arguments = value["name"], value.get("arguments", {})
    if name not in tools:
        return BadCall(f"there is no tool {name[:_SHOWN]!r}; there are {', '.join(sorted(tools))}")
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {name} are an object, not {type(arguments).__name__}")
    error = next(iter(jsonschema.Draft202012Validator(dict(tools[name])).iter_errors(arguments)), None)
    if error is not None:
        where = "/".join(map(str, error.absolute_path))
        return BadCall(
            f"the arguments of {name} are wrong{f' at {where}' if where else ''}: {error.message[:_SHOWN]}"
        )
    return ToolCall(name, arguments)
