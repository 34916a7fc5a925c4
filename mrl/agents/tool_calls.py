"""The tool calls of a policy's turn, read out of its text.

| format | a call |
|---|---|
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several one after the other (Qwen, Hermes) |
| json | the whole visible text is one such object, or a list of them |

A call may name its arguments `parameters` (Llama 3.1), and have an `id` (Mistral) and a `type`. Nothing is repaired or guessed: a
call that cannot be read is the policy's mistake, and told to it. The work is linear in the text: the driver reads it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jsonschema
from jsonschema.validators import extend

from mrl.data.row_files import named_once
from mrl.rewards.visible import visible_text

Format = Literal["hermes", "json"]

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_MARKS = re.compile(f"({_OPENS}|{_CLOSES})")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "id", "type", *_ARGUMENTS}
_SHOWN = 200
_MOST = 64
"""Calls of a turn: each is answered, and all answers together are bounded."""
_DEEPEST = 64
"""Objects and lists inside each other in a call."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that can be carried out."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """What the policy calls it; empty where it gives no id."""


@dataclasses.dataclass(frozen=True, slots=True)
class BadCall:
    """What cannot, and why, in words for the policy."""

    reason: str
    name: str = ""
    """The tool that it names; empty unless there is such a tool."""
    id: str = ""


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
    bodies, are_paired = _between_marks(text)
    if len(bodies) > _MOST:
        return [_too_many(len(bodies))]
    found = [_call(body, tools) for body in bodies]
    if not are_paired:
        found.append(BadCall("a <tool_call> that is opened and not closed, or closed and not opened"))
    return found


def described(tools: Sequence[Mapping[str, Any]], format: Format) -> str:
    """The tools as a system message shows them, and how they are called; empty without tools."""
    if not tools:
        return ""
    call = '{"name": NAME, "arguments": {...}}'
    written = (
        f"{_OPENS}{call}{_CLOSES}" if format == "hermes" else f"nothing but {call}, or a list of such objects"
    )
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"You can call these tools, which are given as JSON schemas:\n{schemas}\n\nTo call one, write {written}."


def _between_marks(text: str) -> tuple[list[str], bool]:
    """The texts from an opening mark to the next closing one, and whether every other mark is inside them."""
    bodies, are_paired, opened = list[str](), True, list[str]()
    for number, part in enumerate(_MARKS.split(text)):
        is_mark = number % 2 == 1
        if opened and is_mark and part == _CLOSES:
            bodies.append("".join(opened[1:]))
            opened.clear()
        elif opened or (is_mark and part == _OPENS):
            opened.append(part)
        elif is_mark:
            are_paired = False
    return bodies, are_paired and not opened


def _whole(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[ToolCall | BadCall]:
    text = text.strip()
    if not text.startswith(("{", "[")):
        return []
    value = _json(text)
    if isinstance(value, BadCall):
        return [value]
    items = value if isinstance(value, list) else [value]
    return [_too_many(len(items))] if len(items) > _MOST else [_checked(item, tools) for item in items]


def _too_many(count: int) -> BadCall:
    return BadCall(f"a turn has at most {_MOST} calls, and this one {count}; none is carried out")


def _call(body: str, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | BadCall:
    value = _json(body.strip())
    return value if isinstance(value, BadCall) else _checked(value, tools)


def _json(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=named_once)
        _require_plain(value)
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is no JSON ({str(error)[:_SHOWN]})")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _require_plain(value: Any) -> None:
    """ValueError for what a tool cannot take as JSON: very deep values, infinite numbers, halves of characters."""
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += [*each.keys(), *each.values()]
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, str):
                each.encode()  # a UnicodeEncodeError is a ValueError
            elif isinstance(each, float) and not math.isfinite(each):
                raise ValueError("a number that is too large")
        level, depth = inner, depth + 1
        if depth > _DEEPEST:
            raise ValueError(f"brackets in brackets, deeper than {_DEEPEST}")


def _checked(value: Any, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | BadCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call is an object with "name" and "arguments"')
    name, own = value["name"], value.get("id")
    own = own if isinstance(own, str) else ""
    if name not in tools:
        return BadCall(f"there is no tool {name[:_SHOWN]!r}; there are {', '.join(sorted(tools))}", id=own)
    reason = _wrong(name, value, tools[name])
    return BadCall(reason, name, own) if reason else ToolCall(name, _arguments(value), own)


def _arguments(value: Mapping[str, Any]) -> Any:
    return next((value[key] for key in _ARGUMENTS if key in value), {})


def _wrong(name: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Why a call of a known tool cannot be carried out; empty where it can."""
    if unknown := sorted(value.keys() - _KEYS):
        return f'a call of {name} has "name" and "arguments", and nothing reads {unknown[0][:_SHOWN]!r}'
    if all(key in value for key in _ARGUMENTS):
        return f"a call of {name} has arguments and parameters; give its arguments once"
    arguments = _arguments(value)
    if not isinstance(arguments, dict):
        return f"the arguments of {name} are an object, not {type(arguments).__name__}"
    try:
        error = next(iter(_Validator(dict(schema)).iter_errors(arguments)), None)
    except RecursionError:
        return f"the arguments of {name} are objects in objects, deeper than can be read"
    if error is None:
        return ""
    where = "/".join(map(str, error.absolute_path))
    return f"the arguments of {name} are wrong{f' at {where}' if where else ''}: {error.message[:_SHOWN]}"


def _unique_items(validator: Any, wanted: bool, items: Any, schema: Any) -> Iterator[Any]:
    """As jsonschema has it, which compares each two items of a list that cannot be sorted."""
    if not wanted or not validator.is_type(items, "array"):
        return
    if len({json.dumps(_canonical(item), sort_keys=True) for item in items}) < len(items):
        yield jsonschema.ValidationError("a list has an item twice")


def _canonical(value: Any) -> Any:
    """Equal JSON values as equal texts: 1.0 is 1."""
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Validator = extend(jsonschema.Draft202012Validator, {"uniqueItems": _unique_items})
