"""Environments in other systems' forms, and servers that may answer anything."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from mrl.agents.adapters.gymnasium import Gymnasium
from mrl.agents.adapters.remote import Remote
from mrl.agents.environment import ToolFailed, Unreachable
from mrl.errors import ConfigError

FILE = f"{__file__}:"


class Walk:
    def __init__(self, length: int = 3) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        self.place = (options or {}).get("start", 0)
        return np.array([self.place]), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.place += 1 if action else -1
        return {"place": self.place}, np.float32(action), self.place >= self.length, self.place < -2, {}

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("options", "turns"),
    [
        ({"action": "number"}, ["go 1", "<think>0</think>1"]),
        ({"action": "choice", "choices": ["back", "on"]}, ["back? no: on", "on"]),
    ],
)
def test_a_gymnasium_environment_is_played(options: dict[str, Any], turns: list[str]) -> None:
    env = Gymnasium(FILE + "Walk", arguments={"length": 3}, **options)
    assert env.reset({"start": 1}, 0) == "[1]"
    assert env.step("nothing of the kind", []).observation == "That is no action."
    steps = [env.step(turn, []) for turn in turns]
    assert [(step.observation, step.reward, step.done) for step in steps] == [
        ('{"place": 2}', 1.0, False),
        ('{"place": 3}', 1.0, True),
    ]
    env.close()


@contextlib.contextmanager
def served(server: Any) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(30)


@pytest.mark.parametrize("kind", ["elsewhere", "huge", "text", "other", "broken"])
def test_a_server_that_answers_otherwise_is_unreachable(kind: str) -> None:
    paths = []

    def handshake(connection: ServerConnection, request: Request) -> Response | None:
        paths.append(request.path)
        if kind == "elsewhere":
            return Response(307, "Elsewhere", Headers({"Location": "/good"}))
        return connection.respond(500, "") if kind == "broken" else None

    def session(connection: ServerConnection) -> None:
        for _ in connection:
            connection.send({"huge": "x" * 300_000, "text": "not JSON"}.get(kind, "[1]"))

    with serve(session, "127.0.0.1", 0, process_request=handshake) as server, served(server):
        env = Remote(f"ws://127.0.0.1:{server.socket.getsockname()[1]}/{kind}")
        with pytest.raises(Unreachable, match=kind):
            env.reset({}, 0)
    assert paths == [f"/{kind}"], "only the address was asked"


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "example.org", "ws://", "ws://me:word@host", "http://host/ws", "ws://host/?a=b"],
)
def test_only_an_address_is_taken(url: str) -> None:
    with pytest.raises(ConfigError, match="must be a ws or wss address"):
        Remote(url)


def test_no_server_is_unreachable() -> None:
    with pytest.raises(Unreachable):
        Remote("ws://127.0.0.1:9/ws", seconds=5.0).reset({}, 0)


@pytest.fixture
def sessions() -> Iterator[str]:
    def session(connection: Any) -> None:
        steps = 0
        for message in connection:
            request = json.loads(message)
            if request["type"] == "close":
                return
            steps += request["type"] == "step"
            data: dict[str, Any] = {"observation": {"n": steps}, "reward": None, "done": steps == 2}
            if request["type"] == "reset":
                data["observation"] |= {
                    name: request["data"][name] for name in request["data"].keys() - {"seed"}
                }
            wrong = request["data"].get("message") in ("wrong", "misspelt")
            code = "VALIDATION_ERROR" if request["data"].get("message") == "misspelt" else "EXECUTION_ERROR"
            error = {"type": "error", "data": {"message": "no such action", "code": code}}
            connection.send(json.dumps(error if wrong else {"type": "observation", "data": data}))

    server: Server
    with serve(session, "127.0.0.1", 0) as server, served(server):
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws"


def test_episodes_have_sessions_of_their_own(sessions: str) -> None:
    one, other = Remote(sessions), Remote(sessions)
    assert one.reset({}, 0) == other.reset({}, 0) == '{"n": 0}'
    assert one.step("a", []).observation == other.step("a", []).observation == '{"n": 1}'
    last = one.step("b", [])
    assert (last.observation, last.reward, last.done) == ('{"n": 2}', None, True)
    with pytest.raises(Unreachable, match="no such action"):
        other.step("wrong", [])
    one.close()
    other.close()
    assert not one.replayable


def test_a_rows_columns_reach_the_server(sessions: str) -> None:
    env = Remote(sessions, columns=["level"])
    assert env.reset({"level": 3, "secret": 4}, 0) == '{"n": 0, "level": 3}'
    env.close()


def test_an_action_that_the_server_does_not_take_is_the_policys_mistake(sessions: str) -> None:
    env = Remote(sessions)
    env.reset({}, 0)
    with pytest.raises(ToolFailed, match="no such action"):
        env.step("misspelt", [])
    env.close()
