"""Tools: what a policy may call in a turn, and how a turn's calls are carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mrl.agents.tool_calls import ToolCall
from mrl.errors import MrlError


class ToolError(MrlError, ValueError):
    """The policy's mistake, in words for it: it is told, and goes on. Whatever else a tool raises is a fault of ours."""


class Tool(Protocol):
    """One tool of one episode."""

    name: str
    description: str

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments, which `run` gets by their names."""
        ...

    @property
    def run(self) -> Callable[..., str]:
        """Gives what the policy is told. ToolError for what it should have known; a tool that can wait or compute for long keeps a
        deadline of its own, and says so in a ToolError."""
        ...

    def close(self) -> None:
        """The episode is over."""
        ...


class ToolBox:
    """The tools of one episode. Calls are carried out in their order, one after the other."""

    def __init__(self, tools: Sequence[Tool], *, max_calls: int = 8, max_chars: int = 8000) -> None:
        """`max_calls` of a turn are carried out, and of each result `max_chars` characters shown."""
        self._tools = {tool.name: tool for tool in tools}
        self._max_calls, self._max_chars = max_calls, max_chars

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [function_schema(t.name, t.description, t.parameters) for t in self._tools.values()]

    def messages(self, calls: Sequence[ToolCall]) -> list[dict[str, str]]:
        """One message of the role tool for each call, in their order."""
        results = [self._result(call) for call in calls[: self._max_calls]]
        results += [f"error: not carried out, a turn has at most {self._max_calls} calls"] * (
            len(calls) - len(results)
        )
        return [{"role": "tool", "content": result} for result in results]

    def close(self) -> None:
        """Ends all tools."""
        for tool in self._tools.values():
            tool.close()

    def _result(self, call: ToolCall) -> str:
        try:
            return shorten(self._tools[call.name].run(**call.arguments), self._max_chars)
        except ToolError as error:
            return shorten(f"error: {error}", self._max_chars)


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates take it."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def arguments_schema(**properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of arguments that are all required, by their names."""
    named = {name: dict(schema) for name, schema in properties.items()}
    return {
        "type": "object",
        "properties": named,
        "required": list(named),
        "additionalProperties": False,
    }


def shorten(text: str, max_chars: int) -> str:
    """The text, or its beginning and its end with what was left out between them."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    tail = max_chars - head
    return f"{text[:head]}\n[{len(text) - max_chars} of {len(text)} characters left out]\n{text[-tail:]}"
