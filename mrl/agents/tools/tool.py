"""Tools that a policy may call in a turn, and how a turn's calls are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mrl.agents.tool_calls import ToolCall
from mrl.errors import MrlError


class ToolError(MrlError, ValueError):
    """Mistake of the policy: it sees the message and continues. Other errors are infrastructure failures."""


class Tool(Protocol):
    """One tool of one episode."""

    name: str
    description: str

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, which `run` gets by name."""
        ...

    @property
    def run(self) -> Callable[..., str]:
        """Function that returns the text for the policy. It raises ToolError for the policy's mistakes; a
        tool that may take long has a deadline of its own, and a ToolError that says so."""
        ...

    def close(self) -> None:
        """End the tool with its episode."""
        ...


class ToolBox:
    """Tools of one episode. Calls run in order, one after another."""

    def __init__(self, tools: Sequence[Tool], *, max_calls: int = 8, max_chars: int = 8000) -> None:
        """At most `max_calls` of a turn run, and each result shows `max_chars` characters."""
        self._tools = {tool.name: tool for tool in tools}
        self._max_calls, self._max_chars = max_calls, max_chars

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Tools in the form of chat templates."""
        return [function_schema(t.name, t.description, t.parameters) for t in self._tools.values()]

    def messages(self, calls: Sequence[ToolCall]) -> list[dict[str, str]]:
        """Run the calls; return one message of the role tool per call, in their order."""
        results = [self._result(call) for call in calls[: self._max_calls]]
        results += [f"error: not carried out, a turn has at most {self._max_calls} calls"] * (
            len(calls) - len(results)
        )
        return [{"role": "tool", "content": result} for result in results]

    def close(self) -> None:
        """Close all tools."""
        for tool in self._tools.values():
            tool.close()

    def _result(self, call: ToolCall) -> str:
        try:
            return shorten(self._tools[call.name].run(**call.arguments), self._max_chars)
        except ToolError as error:
            return shorten(f"error: {error}", self._max_chars)


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chat templates."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def arguments_schema(**properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments that are all required, by name."""
    named = {name: dict(schema) for name, schema in properties.items()}
    return {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}


def shorten(text: str, max_chars: int) -> str:
    """Return the text, or its beginning and end, with a note of what was left out between them."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    tail = max_chars - head
    return f"{text[:head]}\n[{len(text) - max_chars} of {len(text)} characters left out]\n{text[-tail:]}"
