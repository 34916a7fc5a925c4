"""Environments in the forms of other systems, and servers that may answer anything."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.sync.server import Server, serve

from mrl.agents.adapters.gymnasium import Gymnasium
from mrl.agents.adapters.remote import Remote
from mrl.agents.environment import Unreachable
from mrl.errors import ConfigError

FILE = f"{__file__}:"


class Walk:
    """In Gymnasium's form: steps on a line to its end."""

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
    """A server that answers in a thread of its own."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(30)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "example.org",
        "ws://",
        "ws://me:word@host",
        "http://host/x",
        "ws://host/?a=b",
    ],
)
def test_only_an_address_is_taken(url: str) -> None:
    with pytest.raises(ConfigError, match="is an address"):
        Remote(url)


def test_no_server_is_unreachable() -> None:
    with pytest.raises(Unreachable):
        Remote("ws://127.0.0.1:9/ws", seconds=5.0).reset({}, 0)


@pytest.fixture(scope="module")
def sessions() -> Iterator[str]:
    """A server whose sessions count their own steps; an action that names a fault gets it for an answer."""
    faults = {
        "wrong": json.dumps({"type": "error", "data": {"message": "no such action"}}),
        "huge": "x" * 300_000,
        "text": "not JSON",
        "other": "[1]",
        "bare": json.dumps({"type": "observation", "data": {}}),
    }

    def session(connection: Any) -> None:
        steps = 0
        for message in connection:
            said = json.loads(message)
            if said["type"] == "close":
                return
            steps += said["type"] == "step"
            seen = {"n": steps, "told": said["data"]}
            data: dict[str, Any] = {"observation": seen, "reward": None, "done": steps == 2}
            answer = json.dumps({"type": "observation", "data": data})
            connection.send(faults.get(said["data"].get("message"), answer))

    def answer(connection: Any, request: Any) -> Any:
        if request.path == "/elsewhere":
            moved = connection.respond(307, "")
            moved.headers["Location"] = "/ws"
            return moved
        return None

    server: Server
    with serve(session, "127.0.0.1", 0, process_request=answer) as server, served(server):
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws"


def test_episodes_have_sessions_of_their_own(sessions: str) -> None:
    one, other = Remote(sessions, observation="n"), Remote(sessions)
    assert one.reset({"url": "ws://elsewhere"}, 3) == "0"
    assert other.reset({}, 3) == '{"n": 0, "told": {"seed": 3}}', "nothing of a row is sent"
    assert one.step("a", []).observation == "1"
    step = other.step("<think>no</think>hello", [])
    assert step.observation == '{"n": 1, "told": {"message": "hello"}}'
    last = one.step("b", [])
    assert (last.observation, last.reward, last.done) == ("2", None, True)
    one.close()
    other.close()
    assert not one.replayable


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("wrong", "no such action"),
        ("huge", "Closed"),
        ("text", "JSON"),
        ("other", r"\[1\]"),
        ("bare", "without an observation"),
    ],
)
def test_a_server_that_answers_otherwise_is_unreachable(sessions: str, action: str, said: str) -> None:
    env = Remote(sessions)
    env.reset({}, 0)
    with pytest.raises(Unreachable, match=said):
        env.step(action, [])


def test_no_redirect_is_followed(sessions: str) -> None:
    with pytest.raises(Unreachable):
        Remote(sessions.removesuffix("/ws") + "/elsewhere").reset({}, 0)
