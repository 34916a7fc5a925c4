"""Call a judge's server: JSON request, JSON reply, with retries.

It uses httpx and not the client of one API, because it calls two APIs (chat completions and vLLM's
classification), chooses its own pauses, and limits the size of a reply.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
from typing import Any

import httpx

from mrl.errors import ConfigError, RewardError
from mrl.rewards.addresses import proxy_of
from mrl.rewards.contract import NoVerdict
from mrl.rewards.reward_part import RewardPart, ServerSection

MAX_REPLY_BYTES = 4 * 2**20
CONNECT_SECONDS = 10.0
_PAUSE_SECONDS = 0.25
_RESTART_PAUSE_SECONDS = 1.0
_BUSY = {408, 409, 425, 429}
_PROXIES = ("http", "https", *(("socks5", "socks5h") if importlib.util.find_spec("socksio") else ()))
"""Proxy schemes that httpx supports here."""


class _Busy(RewardError):
    """The call failed, but a retry may succeed."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class _Down(RewardError):
    """A server of this run is down and is being restarted; retry until the caller's deadline."""


class Endpoint:
    """Client of one server, for many concurrent calls."""

    def __init__(
        self,
        url: str,
        server: ServerSection,
        *,
        concurrency: int,
        deadline_seconds: float,
        socket: str | None = None,
    ) -> None:
        """Create the client; `socket` is that of a server of this run, which is restarted if it exits.

        Raises ConfigError for a missing API key or a proxy that cannot be used.
        """
        self.url = url.rstrip("/")
        self._server, self._deadline, self._socket = server, deadline_seconds, socket
        self._headers = _headers(server.api_key_env)
        self._limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._proxy = None if socket else proxy_of(url, _PROXIES)
        self._client: httpx.AsyncClient | None = None
        self._jitter = random.Random()

    @classmethod
    def of(cls, part: RewardPart) -> Endpoint:
        """Return the client of the server that `part` names."""
        if part.engine is not None and part.served is None:
            raise ConfigError(f"reward.engines.{part.engine} has not been started")
        socket = part.served.socket if part.served else None
        limits = {"concurrency": part.concurrency, "deadline_seconds": part.deadline_seconds}
        return cls(part.path or "", part.server, socket=socket, **limits)

    @staticmethod
    def identity(part: RewardPart) -> Any:
        """Return the server's identity for a digest: its address, or the digest of a server of this run."""
        return part.served.answers if part.served else part.path

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the server's reply to one call; the caller enforces the deadline.

        Raises RewardError if no try succeeds, and NoVerdict if the server refuses the request.
        """
        last, attempt = None, 0
        while attempt < self._server.tries:
            try:
                return await self._once(route, body)
            except _Down:
                await asyncio.sleep(_RESTART_PAUSE_SECONDS * self._jitter.uniform(0.5, 1.5))
                continue
            except _Busy as error:
                if error.after > self._deadline:
                    raise RewardError(f"{error}; it asks for a pause of {error.after:g} s") from error
                last = error
                pause = max(error.after, _PAUSE_SECONDS * 2**attempt * self._jitter.uniform(0.5, 1.5))
            attempt += 1
            if attempt < self._server.tries:
                await asyncio.sleep(pause)
        raise RewardError(f"{last} ({self._server.tries} tries)") from last

    async def _once(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            self._client = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(
                    limits=self._limits, uds=self._socket, proxy=self._proxy and self._proxy.url
                ),
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                headers=self._headers,
            )
        where = self.url + route + (f" by {self._proxy.variable}" if self._proxy else "")
        try:
            async with self._client.stream("POST", self.url + route, json=body) as response:
                data = await _read(response, where)
        except httpx.HTTPError as error:
            if self._socket and isinstance(error, httpx.TransportError):
                raise _Down(f"{where}: {type(error).__name__}: {error}") from error
            raise _Busy(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code in _BUSY or response.status_code >= 500:
            raise _Busy(f"{where}: status {response.status_code}", _retry_after(response))
        if response.status_code != 200:
            raise NoVerdict(f"{where}: status {response.status_code}: {data[:200]!r}")
        return _decoded(data, where)


async def _read(response: httpx.Response, where: str) -> bytes:
    data = bytearray()
    async for chunk in response.aiter_bytes():
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            raise RewardError(f"{where}: the reply is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(data)


def _decoded(data: bytes, where: str) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{where}: the reply is not valid JSON: {data[:80]!r}") from error
    if not isinstance(reply, dict):
        raise RewardError(f"{where}: the reply is not a JSON object: {data[:80]!r}")
    return reply


def _retry_after(response: httpx.Response) -> float:
    """Return the Retry-After header in seconds; a date (RFC 9110, section 10.2.3) counts as 0."""
    header = response.headers.get("retry-after", "")
    return float(header) if header.isdecimal() else 0.0


def _headers(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env, "")
    if not key:
        raise ConfigError(f"api_key_env = {api_key_env!r}: set this environment variable; it is empty")
    return {"Authorization": f"Bearer {key}"}
