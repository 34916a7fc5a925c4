"""Calls of one server: JSON out, JSON back, tried again where that may help.

Made with httpx and not with a client of one interface: two interfaces are asked (chat completions and vLLM's
classification), the pauses are ours to choose, and a reply is read up to a limit.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import Any

import httpx

from mrl.errors import ConfigError, RewardError
from mrl.rewards.judges.rules import EndpointRules

MAX_REPLY_BYTES = 4 * 2**20
CONNECT_SECONDS = 10.0
_PAUSE_SECONDS = 0.25
_BUSY = {408, 409, 425, 429}


class _Busy(RewardError):
    """A call that may go well later."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class Endpoint:
    """A server that many calls at once are made of."""

    def __init__(self, url: str, rules: EndpointRules, *, concurrency: int, deadline_seconds: float) -> None:
        """ConfigError for an address that is none and a key that is not there."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.path = {url!r}: a model that judges is an http:// or https:// address")
        self.url = url.rstrip("/")
        self._rules, self._deadline = rules, deadline_seconds
        self._headers = _headers(rules.api_key_env)
        self._limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client: httpx.AsyncClient | None = None
        self._jitter = random.Random()
        self._not_before = 0.0

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to one call. RewardError where there is none; the caller has the deadline."""
        last = None
        for attempt in range(self._rules.tries):
            await self._turn()
            try:
                return await self._once(route, body)
            except _Busy as error:
                if error.after > self._deadline:
                    raise RewardError(f"{error}; it asks for a pause of {error.after:g} s") from error
                last = error
                pause = max(error.after, _PAUSE_SECONDS * 2**attempt * self._jitter.uniform(0.5, 1.5))
            if attempt + 1 < self._rules.tries:
                await asyncio.sleep(pause)
        raise RewardError(f"{last} ({self._rules.tries} tries)") from last

    async def _turn(self) -> None:
        """Waits for a call's turn where only so many are begun in a minute."""
        if self._rules.calls_per_minute is None:
            return
        now = time.monotonic()
        at = max(now, self._not_before)
        self._not_before = at + 60.0 / self._rules.calls_per_minute
        await asyncio.sleep(at - now)

    async def _once(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
            self._client = httpx.AsyncClient(timeout=timeout, limits=self._limits, headers=self._headers)
        where = self.url + route
        try:
            async with self._client.stream("POST", where, json=body) as response:
                data = await _read(response, where)
        except httpx.HTTPError as error:
            raise _Busy(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code in _BUSY or response.status_code >= 500:
            raise _Busy(f"{where}: status {response.status_code}", _retry_after(response))
        if response.status_code != 200:
            raise RewardError(f"{where}: status {response.status_code}: {data[:200]!r}")
        return _decoded(data, where)


async def _read(response: httpx.Response, where: str) -> bytes:
    data = bytearray()
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > MAX_REPLY_BYTES:
            raise RewardError(f"{where}: a reply of more than {MAX_REPLY_BYTES} bytes")
    return bytes(data)


def _decoded(data: bytes, where: str) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{where}: a reply that is no JSON: {data[:80]!r}") from error
    if not isinstance(reply, dict):
        raise RewardError(f"{where}: a reply that is no object: {data[:80]!r}")
    return reply


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to be left alone; dates (RFC 9110, section 10.2.3) are not read."""
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdecimal() else 0.0


def _headers(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env, "")
    if not key:
        raise ConfigError(f"api_key_env = {api_key_env!r}: there is no such environment variable")
    return {"Authorization": f"Bearer {key}"}
