"""Search over an index, and the tools of MCP servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mrl.agents.answer import EnvironmentResult
from mrl.agents.environment import Unreachable
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.pool import EnvironmentWorkers
from mrl.agents.tool_calls import ToolCall
from mrl.agents.tools.mcp import McpServer
from mrl.agents.tools.search import Search, build_index
from mrl.agents.tools.sources import make_tools
from mrl.agents.tools.tool import ToolBox, ToolError
from mrl.errors import ConfigError
from tests.support import mcp_server

SERVER = [sys.executable, str(mcp_server.__file__)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("index") / "index.db"
    documents = [(f"Town {n}", f"Town {n} lies on a river and has {n} bridges.") for n in range(200)]
    build_index(
        path, [*documents, ("Żółw", "A żółw is a turtle in Polish."), ("Turtles", "Turtles swim slowly.")]
    )
    return str(path)


def test_documents_are_found_by_their_words(index: str) -> None:
    search = Search(index, results=2)
    first, second = search.run("Which town has 117 bridges?").split("\n\n")
    assert first == "Town 117\nTown 117 lies on a river and has 117 bridges." and second.startswith("Town ")
    assert search.run("swimming TURTLE").startswith("Turtles\n")
    assert search.run("żółw").startswith("Żółw\n")
    assert search.run("nowhere") == "nothing found"
    search.close()


@pytest.mark.parametrize(
    "query",
    ["a OR", "NEAR(town, river)", "title: town", "x* - ^", "'; DROP TABLE documents;", "town" * 10**5],
)
def test_no_query_is_an_expression(index: str, query: str) -> None:
    search = Search(index)
    assert search.run(query)
    assert "Town 7\n" in search.run("town 7")
    with pytest.raises(ToolError, match="must have words"):
        search.run('"*"')
    search.close()


def test_a_search_has_a_deadline(index: str) -> None:
    search = Search(index, seconds=-1.0)
    with pytest.raises(ToolError, match="time limit"):
        search.run(" ".join(str(n) for n in range(28)) + " town river bridges lies")
    search.close()


def test_an_index_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no index")
    for name in ("text", "missing"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            Search(str(tmp_path / name))


@pytest.fixture(scope="module")
def server() -> Iterator[McpServer]:
    made = McpServer(SERVER)
    yield made
    made.close()


def test_a_server_says_which_tools_it_has(server: McpServer) -> None:
    tools = {tool.name: tool for tool in server.tools}
    assert list(tools) == ["double", "fail", "hang", "die"]
    assert tools["double"].description == "Twice a number."
    assert tools["double"].parameters["properties"]["number"]["type"] == "integer"


def test_a_servers_tool_is_called_and_its_failure_told(server: McpServer) -> None:
    tools = {tool.name: tool for tool in server.tools}
    assert tools["double"].run(number=21) == "42"
    with pytest.raises(ToolError, match="not today"):
        tools["fail"].run(why="not today")
    assert tools["double"].run(number=2) == "4"


def test_a_server_that_dies_or_says_nothing_is_ours_and_leaves_no_process() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for name, seconds in (("die", 60.0), ("hang", 0.5)):
        server = McpServer(SERVER, seconds=seconds)
        with pytest.raises(Unreachable, match=name):
            server.call(name, {})
        server.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_command_that_is_no_server_is_ours() -> None:
    with pytest.raises(Unreachable, match="no_such_program"):
        McpServer(["/no_such_program"])


def test_tools_are_made_as_settings_name_them(index: str) -> None:
    box = ToolBox(make_tools([{"kind": "calculator"}, {"kind": "search", "index": index}]))
    assert [schema["function"]["name"] for schema in box.schemas] == ["calculator", "search"]
    calls = [ToolCall("search", {"query": "nowhere"}), ToolCall("calculator", {"expression": "1+1"})]
    assert [message["content"] for message in box.messages(calls)] == ["nothing found", "2"]
    box.close()
    with pytest.raises(ConfigError, match="kind must be one of"):
        make_tools([{"kind": "pythons"}])
    with pytest.raises(ConfigError, match="different names"):
        make_tools([{"kind": "calculator"}, {"kind": "calculator"}])


def test_an_environment_with_a_server_is_hosted() -> None:
    spec = EnvironmentSpec("python_maths", {"tools": [{"kind": "mcp", "command": SERVER}]})
    with EnvironmentWorkers(
        {"maths": spec}, Deadlines(reset_seconds=200.0, step_seconds=100.0, close_seconds=20.0)
    ) as pool:
        assert "double" in pool.describe("maths").schemas()
        pool.open("key", "maths", {"answer": "#### 42"}, 0)
        assert said(pool).messages == ()
        pool.step("key", "", [ToolCall("double", {"number": 21})])
        assert said(pool).messages == ({"role": "tool", "content": "42"},)
        pool.step("key", "#### 42")
        assert said(pool).reward == 1.0


def said(pool: EnvironmentWorkers) -> EnvironmentResult:
    (answer,) = pool.poll(120.0)
    return answer
