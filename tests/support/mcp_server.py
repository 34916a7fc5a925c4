"""An MCP server with tools that answer, fail, hang and die."""

from __future__ import annotations

import os
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("for tests")


@server.tool()
def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ToolError(why)


@server.tool()
def hang() -> str:
    """Says nothing."""
    time.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
