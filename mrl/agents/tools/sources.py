"""Tools by their settings: {"kind": "python", "seconds": 5}."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.agents.tools.arithmetic_tool import Arithmetic
from mrl.agents.tools.mcp import McpServer
from mrl.agents.tools.python import Python, Shell
from mrl.agents.tools.search import Search
from mrl.agents.tools.tool import Tool
from mrl.errors import ConfigError

_KINDS: dict[str, Callable[..., Sequence[Tool]]] = {
    "calculator": lambda **options: [Arithmetic(**options)],
    "python": lambda **options: [Python(**options)],
    "shell": lambda **options: [Shell(**options)],
    "search": lambda **options: [Search(**options)],
    "mcp": lambda **options: McpServer(**options).tools,
}
SANDBOXED = {"python", "shell"}
"""Kinds whose calls run in the sandbox."""


def make_tools(sources: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the tools of one episode. Raise ConfigError for unknown kinds, bad options or equal names."""
    tools: list[Tool] = []
    for source in sources:
        options = dict(source)
        kind = options.pop("kind", None)
        if kind not in _KINDS:
            raise ConfigError(f"a tool's kind must be one of {', '.join(_KINDS)}, not {kind!r}")
        tools += _KINDS[kind](**options)
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ConfigError(f"tools must have different names; these are {names}")
    return tools
