"""Environments behind a server in OpenEnv's form, one session of a WebSocket (`/ws`) for each episode.

| reset | step | answer |
|---|---|---|
| {"type": "reset", "data": {"seed"}} | {"type": "step", "data": action} | {"type": "observation", "data": ...} |

`...` is {"observation": {...}, "reward": a number or null, "done": true or false}. Source: OpenEnv's core/env_server. Its HTTP is not
asked: there all who ask may have one episode.

Only the configured address is ever asked: no redirect is followed, no proxy is used, and nothing of a row or of the policy's text
becomes a part of it. A server that does not answer, or answers otherwise, is a fault of ours.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.agents.environment import Step, Unreachable
from mrl.agents.tool_calls import ToolCall
from mrl.errors import ConfigError
from mrl.rewards.visible import visible_text

_PORTS = {"ws": 80, "wss": 443}


class Remote:
    """An episode of a server at `url`."""

    replayable = False

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str | None = None,
        seconds: float = 20.0,
        max_kib: int = 256,
    ) -> None:
        """`action`: the field of an action that the visible text of a turn goes in. `observation`: the field of an observation that
        is shown; all of it, as JSON, when absent. `seconds`: of one request. ConfigError for another kind of address."""
        parts = urllib.parse.urlsplit(url)
        if (
            parts.scheme not in _PORTS
            or not parts.hostname
            or parts.username
            or parts.query
            or parts.fragment
        ):
            raise ConfigError(
                f"agent.options.url = {url!r} is an address: ws or wss, a host, a port and a path (ws://HOST:8000/ws)"
            )
        self._parts, self._action, self._observation = parts, action, observation
        self._seconds, self._max_bytes = seconds, max_kib * 1024
        self._opened = contextlib.ExitStack()
        self._connection: Any = None

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """The first observation. Unreachable where there is none to be had."""
        from websockets.sync.client import connect

        parts = self._parts
        where = (parts.hostname or "", parts.port or _PORTS[parts.scheme])
        secure = ssl.create_default_context() if parts.scheme == "wss" else None
        try:
            # Over a socket of ours no redirect can be followed.
            opening = connect(
                parts.geturl(),
                sock=socket.create_connection(where, timeout=self._seconds),
                ssl=secure,
                proxy=None,
                open_timeout=self._seconds,
                max_size=self._max_bytes,
            )
            self._connection = self._opened.enter_context(opening)
        except Exception as error:  # of the name, the socket, TLS or the protocol
            raise Unreachable(f"{parts.geturl()}: {error}") from error
        return self._shown(self._asked("reset", {"seed": seed}))

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """What the server makes of a turn."""
        said = self._asked("step", {self._action: visible_text(text)})
        return Step(self._shown(said), said.get("reward"), bool(said.get("done", False)))

    def close(self) -> None:
        """Ends the session."""
        with self._opened:
            if self._connection is not None:
                self._connection.send(json.dumps({"type": "close"}))

    def _asked(self, operation: str, content: Mapping[str, Any]) -> dict[str, Any]:
        url = self._parts.geturl()
        try:
            self._connection.send(json.dumps({"type": operation, "data": content}))
            answer = json.loads(self._connection.recv(timeout=self._seconds))
        except Exception as error:  # of the connection, its limits, or an answer that is no JSON
            raise Unreachable(f"{url}: {error!r}") from error
        if not isinstance(answer, dict) or answer.get("type") != "observation":
            raise Unreachable(f"{url}: {str(answer)[:300]}")
        said = answer.get("data")
        if not isinstance(said, dict) or "observation" not in said:
            raise Unreachable(f"{url}: an answer without an observation: {str(said)[:100]}")
        return said

    def _shown(self, said: Mapping[str, Any]) -> str:
        seen = said["observation"]
        if self._observation is not None and isinstance(seen, dict):
            seen = seen.get(self._observation)
        return seen if isinstance(seen, str) else json.dumps(seen)
