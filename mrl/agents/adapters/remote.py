"""Environments on a server in OpenEnv's form, one session per episode.

Messages are {"type": "reset", "data": {"seed"}} and {"type": "step", "data": action}. The answer is {"type":
"observation", "data": {"observation": {...}, "reward": a number or null, "done": true or false}}, or {"type":
"error", "data": {"code", "message"}}. Source: OpenEnv 0.10's core/env_server. Its HTTP requests are not used:
each gets an environment of its own there. An action that does not fit the server's schema (VALIDATION_ERROR)
is the policy's mistake.

Only the configured address is contacted: no redirect is followed, no proxy is used, and nothing of a row or
of the policy's text becomes part of it. Any other response, or none, is an infrastructure failure."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.agents.environment import Step, ToolFailed, Unreachable
from mrl.agents.tool_calls import ToolCall
from mrl.errors import ConfigError
from mrl.rewards.visible import visible_text

_PORTS = {"ws": 80, "wss": 443}


class Remote:
    """An episode on the server at `url`."""

    replayable = False

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str | None = None,
        columns: Sequence[str] = (),
        seconds: float = 20.0,
        max_kib: int = 256,
    ) -> None:
        """`action`: field of an action that gets the turn's visible text. `observation`: field of an
        observation that is shown; all of it, as JSON, if absent. `columns`: columns of the row that reset
        gets, besides the seed. `seconds`: limit of one request. Raise
        ConfigError for another kind of address."""
        parts = urllib.parse.urlsplit(url)
        if (
            parts.scheme not in _PORTS
            or not parts.hostname
            or parts.username
            or parts.query
            or parts.fragment
        ):
            raise ConfigError(
                f"agent.options.url = {url!r} must be a ws or wss address: host, port and path (OpenEnv's is "
                "/ws)"
            )
        self._parts, self._action, self._observation = parts, action, observation
        self._columns = tuple(columns)
        self._seconds, self._max_bytes = seconds, max_kib * 1024
        self._session: _Session | None = None

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """Return the first observation. Raise Unreachable if there is none."""
        self._session = _Session(self._parts, self._seconds, self._max_bytes)
        columns = {name: task[name] for name in self._columns}
        return self._shown(self._request("reset", {**columns, "seed": seed}))

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """Return the server's answer to a turn. Raise ToolFailed if the turn is no action."""
        answer = self._request("step", {self._action: visible_text(text)})
        return Step(self._shown(answer), answer.get("reward"), bool(answer.get("done", False)))

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()

    def _request(self, operation: str, content: Mapping[str, Any]) -> dict[str, Any]:
        assert self._session is not None, "reset comes first"
        answer = self._session.ask(operation, content)
        if not isinstance(answer, dict) or "observation" not in answer:
            raise Unreachable(f"{self._parts.geturl()}: no observation in the answer {str(answer)[:100]}")
        return answer

    def _shown(self, answer: Mapping[str, Any]) -> str:
        seen = answer["observation"]
        if self._observation is not None and isinstance(seen, dict):
            seen = seen.get(self._observation)
        return seen if isinstance(seen, str) else json.dumps(seen)


class _Session:
    def __init__(self, parts: urllib.parse.SplitResult, seconds: float, max_bytes: int) -> None:
        from websockets.sync.client import connect

        self._url, self._seconds, self._max_bytes = parts.geturl(), seconds, max_bytes
        where = (parts.hostname or "", parts.port or _PORTS[parts.scheme])
        self._opened = contextlib.ExitStack()
        secure = ssl.create_default_context() if parts.scheme == "wss" else None
        try:
            # Over a socket of our own no redirect can be followed.
            opening = connect(
                self._url,
                sock=socket.create_connection(where, timeout=seconds),
                ssl=secure,
                proxy=None,
                open_timeout=seconds,
                max_size=max_bytes,
            )
            self._connection = self._opened.enter_context(opening)
        except Exception as error:  # DNS, socket, TLS or protocol
            raise Unreachable(f"{self._url}: {error}") from error

    def ask(self, operation: str, content: Mapping[str, Any]) -> Any:
        try:
            self._connection.send(json.dumps({"type": operation, "data": content}))
            data = self._connection.recv(timeout=self._seconds)
        except Exception as error:
            raise Unreachable(f"{self._url}: {error!r}") from error
        answer = _json(data, self._max_bytes, self._url)
        if not isinstance(answer, dict) or answer.get("type") != "observation":
            error = answer.get("data") if isinstance(answer, dict) else None
            if operation == "step" and isinstance(error, dict) and error.get("code") == "VALIDATION_ERROR":
                raise ToolFailed(f"the action does not fit the environment: {str(error)[:300]}")
            raise Unreachable(f"{self._url}: {str(answer)[:300]}")
        return answer.get("data")

    def close(self) -> None:
        """End the session."""
        with self._opened:
            self._connection.send(json.dumps({"type": "close"}))


def _json(data: str | bytes, max_bytes: int, url: str) -> Any:
    if len(data) > max_bytes:
        raise Unreachable(f"{url}: an answer of more than {max_bytes} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreachable(f"{url}: an answer that is not valid JSON: {data[:80]!r}") from error
