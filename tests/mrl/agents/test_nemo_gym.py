"""Tasks of a resources server in NeMo-Gym's form. The stand-in follows `example_session_state_mgmt` of
nemo-gym 0.4.0: a counter per session, which is a cookie."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mrl.agents.adapters.nemo_gym import NemoGym
from mrl.agents.environment import Model, Unreachable
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.errors import ConfigError
from tests.support.acted_programs import call, reward_of, sample_of

INTEGER = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
ROW = {
    "responses_create_params": {
        "input": "add 1, then get the count",
        "tools": [
            {"type": "function", "name": "increment_counter", "strict": True, "parameters": INTEGER},
            {
                "type": "function",
                "name": "get_counter_value",
                "parameters": {"type": "object", "properties": {}},
            },
        ],
    },
    "initial_count": 3,
    "expected_count": 4,
}


class Counting(http.server.BaseHTTPRequestHandler):
    counters: dict[str, int] = {}
    verified: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.headers.get("Cookie", "").removeprefix("session=") or str(len(self.counters))
        status, reply = 200, dict[str, Any]()
        match self.path:
            case "/seed_session":
                self.counters[session] = body["initial_count"]
            case "/increment_counter" if body["count"] > 9:
                status, reply = 422, {"detail": "too many"}
            case "/increment_counter":
                self.counters[session] += body["count"]
            case "/get_counter_value":
                reply = {"count": self.counters[session]}
            case "/verify":
                self.verified.append(body)
                reply = body | {"reward": float(self.counters[session] == body["expected_count"])}
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Set-Cookie", f"session={session}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(30)


def test_tools_of_a_session_change_what_its_verifier_rewards(server: str) -> None:
    spec = EnvironmentSpec("nemo_gym", {"url": server})
    turns = [
        '{"name": "increment_counter", "arguments": {"count": 1}}',
        call("get_counter_value"),
        "It is 4.",
    ]
    turns[0] = f"<tool_call>\n{turns[0]}\n</tool_call>"
    sample = sample_of(spec, "not the input", turns, **ROW)
    assert sample.transcript is not None and not sample.branches
    assert [turn.observation for turn in sample.transcript.turns] == ["{}", '{"count": 4}', ""]
    assert reward_of(sample) == 1.0
    kinds = [item["type"] for item in Counting.verified[-1]["response"]["output"]]
    assert kinds == [*["function_call", "function_call_output"] * 2, "message"]
    assert Counting.verified[-1]["initial_count"] == 3
    assert reward_of(sample_of(spec, "?", ["It is 4."], **ROW)) == 0.0, "another session"


def test_a_tools_refusal_is_shown_to_the_policy(server: str) -> None:
    turn = '<tool_call>\n{"name": "increment_counter", "arguments": {"count": 10}}\n</tool_call>'
    sample = sample_of(EnvironmentSpec("nemo_gym", {"url": server}), "?", [turn, "No."], **ROW)
    assert sample.transcript is not None and "too many" in sample.transcript.turns[0].observation


def test_no_more_turns_than_steps(server: str) -> None:
    spec = EnvironmentSpec("nemo_gym", {"url": server, "max_steps": 1})
    assert reward_of(sample_of(spec, "?", [call("get_counter_value")], **ROW)) == 0.0


def test_a_server_that_is_not_there_is_no_reward() -> None:
    model = Model("http://127.0.0.1:9", "key")
    with pytest.raises(Unreachable, match="seed_session"):
        asyncio.run(NemoGym("http://127.0.0.1:9").run(ROW, 0, model))
    with pytest.raises(ConfigError, match="must be an http or https address"):
        NemoGym("file:///etc/passwd")
