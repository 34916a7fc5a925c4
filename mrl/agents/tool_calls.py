"""Parser of the tool calls in the text of a policy's turn.

| format | a call |
|---|---|
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number (Qwen, Hermes) |
| json | the whole visible text is one such object, or a list of them |

A call may name its arguments `parameters` (Llama 3.1), and have an `id` (Mistral) and a `type`. Nothing is
repaired or guessed: a call that cannot be read is the policy's mistake, and the policy is told. The work is
linear in the text, because the driver does it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jsonschema
import referencing
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
"""Most calls of a turn: each is answered, and all answers together are bounded."""
_DEEPEST = 64
"""Deepest nesting of objects and lists in a call."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be run."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The policy's id for the call; empty if it gives none."""


@dataclasses.dataclass(frozen=True, slots=True)
class BadCall:
    """A call that cannot be run, and why, in words for the policy."""

    reason: str
    name: str = ""
    """Tool that the call names; empty if there is no such tool."""
    id: str = ""


def parse_tool_calls(
    response: str, format: Format, tools: Mapping[str, Mapping[str, Any]]
) -> list[ToolCall | BadCall]:
    """Return the calls of a turn, in order.

    `tools`: the JSON schema of each tool's arguments, by the tool's name. Only text after the last closed
    thought counts; a call inside an unclosed thought is ignored."""
    text = visible_text(response)
    if format == "json":
        return _whole(text, tools)
    bodies, are_paired = _between_marks(text)
    if len(bodies) > _MOST:
        return [_too_many(len(bodies))]
    calls = [_call(body, tools) for body in bodies]
    if not are_paired:
        calls.append(BadCall("a <tool_call> that is opened and not closed, or closed and not opened"))
    return calls


def tools_prompt(tools: Sequence[Mapping[str, Any]], format: Format) -> str:
    """Return the text of a system message that shows the tools and how to call them; empty without tools."""
    if not tools:
        return ""
    call = '{"name": NAME, "arguments": {...}}'
    written = (
        f"{_OPENS}{call}{_CLOSES}" if format == "hermes" else f"nothing but {call}, or a list of such objects"
    )
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools, which are given as JSON schemas:\n{schemas}\n\n"
        f"To call one, write {written}."
    )


def without_calls(text: str, format: Format) -> str:
    """Return the visible text of a turn without its calls."""
    if format == "json":
        return ""
    return re.sub(f"{_OPENS}.*?{_CLOSES}", "", text, flags=re.DOTALL).strip()


def _between_marks(text: str) -> tuple[list[str], bool]:
    """Return the texts from each opening mark to the next closing one, and True if no mark is unpaired."""
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
        return BadCall(f"the call is not valid JSON ({str(error)[:_SHOWN]})")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _require_plain(value: Any) -> None:
    """Raise ValueError if tools cannot take the value as JSON: too deep, infinite, with lone surrogates."""
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                inner += [*node.keys(), *node.values()]
            elif isinstance(node, list):
                inner += node
            elif isinstance(node, str):
                node.encode()  # a UnicodeEncodeError is a ValueError
            elif isinstance(node, float) and not math.isfinite(node):
                raise ValueError("a number that is too large")
        level, depth = inner, depth + 1
        if depth > _DEEPEST:
            raise ValueError(f"brackets in brackets, deeper than {_DEEPEST}")


def _checked(value: Any, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | BadCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call is an object with "name" and "arguments"')
    name, call_id = value["name"], value.get("id")
    call_id = call_id if isinstance(call_id, str) else ""
    if name not in tools:
        return BadCall(
            f"there is no tool {name[:_SHOWN]!r}; there are {', '.join(sorted(tools))}", id=call_id
        )
    reason = _wrong(name, value, tools[name])
    return BadCall(reason, name, call_id) if reason else ToolCall(name, _arguments(value), call_id)


def _arguments(value: Mapping[str, Any]) -> Any:
    return next((value[key] for key in _ARGUMENTS if key in value), {})


def _wrong(name: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return why a call of a known tool cannot be run; empty if it can."""
    if unknown := sorted(value.keys() - _KEYS):
        return f'a call of {name} has "name" and "arguments", and not {unknown[0][:_SHOWN]!r}'
    if all(key in value for key in _ARGUMENTS):
        return f"a call of {name} has arguments and parameters; give its arguments once"
    arguments = _arguments(value)
    if not isinstance(arguments, dict):
        return f"the arguments of {name} must be an object, not {type(arguments).__name__}"
    try:
        validator = _Validator(dict(schema), registry=referencing.Registry())  # which fetches nothing
        error = next(iter(validator.iter_errors(arguments)), None)
    except RecursionError:
        return f"the arguments of {name} are nested too deeply"
    except Exception as broken:  # the schema may be a program's, and is checked only for its form
        return f"the schema of {name} cannot be applied: {str(broken)[:_SHOWN]}"
    if error is None:
        return ""
    where = "/".join(map(str, error.absolute_path))
    return f"the arguments of {name} are wrong{f' at {where}' if where else ''}: {error.message[:_SHOWN]}"


def _unique_items(validator: Any, wanted: bool, items: Any, schema: Any) -> Iterator[Any]:
    """Check as jsonschema does, which compares all pairs of items of a list that cannot be sorted."""
    if not wanted or not validator.is_type(items, "array"):
        return
    if len({json.dumps(_canonical(item), sort_keys=True) for item in items}) < len(items):
        yield jsonschema.ValidationError("a list has an item twice")


def _canonical(value: Any) -> Any:
    """Return a value whose text is the same for equal JSON values: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Validator = extend(jsonschema.Draft202012Validator, {"uniqueItems": _unique_items})
