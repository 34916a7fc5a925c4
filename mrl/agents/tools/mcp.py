"""Tools of a Model Context Protocol server on standard input and output, by the official `mcp` package (extra
`agents`). Source: https://modelcontextprotocol.io/specification, sections Tools and Transports.

A server belongs to one episode: it starts and ends with the episode's environment. The policy is told a
tool's failure; a server that is unavailable or does not respond is an infrastructure failure."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from mrl.agents.environment import Unreachable
from mrl.agents.tools.tool import ToolError
from mrl.errors import ConfigError
from mrl.processes.start import with_lifeline
from mrl.user_code import child_path

_START_SECONDS = 60.0


class McpServer:
    """A running MCP server."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, seconds: float = 20.0
    ) -> None:
        """`command`: starts it, with HOME, PATH and the like of this process, and `env`. `seconds`: limit of
        one call. Raise ConfigError without the package, Unreachable if no server starts."""
        try:
            from anyio.from_thread import start_blocking_portal
        except ImportError as error:
            raise ConfigError("tools of MCP servers need the package mcp: pip install mrl[agents]") from error
        self._seconds = seconds
        self._stack = contextlib.ExitStack()
        try:
            self._portal = self._stack.enter_context(start_blocking_portal())
            session = self._portal.wrap_async_context_manager(_session(command, env or {}))
            self._session = self._stack.enter_context(session)
            listed = self._portal.call(self._session.list_tools)
        except ImportError as error:
            self._stack.close()
            raise ConfigError("tools of MCP servers need the package mcp: pip install mrl[agents]") from error
        except Exception as error:
            self._stack.close()
            raise Unreachable(f"the MCP server {list(command)}: {_first(error)!r}") from error
        self._is_open = True
        self.tools = [McpTool(self, tool) for tool in listed.tools]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's text. Raise ToolError if it reports a failure, Unreachable if it is late."""
        try:
            result = self._portal.call(self._call_tool, name, dict(arguments))
        except TimeoutError as error:
            raise Unreachable(f"the MCP tool {name}: no answer within {self._seconds:g} s") from error
        except Exception as error:
            raise Unreachable(f"the MCP tool {name}: {_first(error)!r}") from error
        text = "\n".join(
            part.text if part.type == "text" else f"[{part.type} left out]" for part in result.content
        )
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the server, unless it has ended."""
        if self._is_open:
            self._is_open = False
            self._stack.close()

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        import anyio

        with anyio.fail_after(self._seconds):
            return await self._session.call_tool(name, arguments)


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpServer, tool: Any) -> None:
        self._server = server
        self.name, self.description = str(tool.name), str(tool.description or "")
        self.parameters: dict[str, Any] = dict(tool.input_schema)

    def run(self, **arguments: Any) -> str:
        """Call the tool as `McpServer.call` does."""
        return self._server.call(self.name, arguments)

    def close(self) -> None:
        """End the server, with all its tools."""
        self._server.close()


@contextlib.asynccontextmanager
async def _session(command: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Any]:
    import anyio
    from mcp.client.session import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    # It ends with this process, even if this is killed.
    program, *words = with_lifeline(command)
    parameters = StdioServerParameters(command=program, args=words, env={**child_path(), **env})
    async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
        with anyio.fail_after(_START_SECONDS):
            await session.initialize()
        yield session


def _first(error: BaseException) -> BaseException:
    """Return the first single error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
