"""Frames between the pool and a reward worker: a length, then bytes.

Requests go out pickled (from the trusted side); replies come back as JSON with a size limit, because a reward
worker may have been harmed by what it read. Owns encoding and decoding; who waits for what is elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from mrl.errors import RewardError
from mrl.rewards.contract import checked_value, printable
from mrl.samples import Verdict, VerdictKind

MAX_REPLY_BYTES = 8 * 2**20
_HEADER = struct.Struct("<I")
_MAX_REASON = 500
_MAX_PARTS = 64


def frame(payload: bytes) -> bytes:
    """The payload behind its length."""
    return _HEADER.pack(len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next payload of a blocking stream; None at its end."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    payload = stream.read(length)
    return payload if len(payload) == length else None


async def read_frame_async(stream: asyncio.StreamReader) -> bytes | None:
    """`read_frame` of an event loop's stream."""
    try:
        (length,) = _HEADER.unpack(await stream.readexactly(_HEADER.size))
        return await stream.readexactly(length)
    except asyncio.IncompleteReadError:
        return None


class OversizedFrame(RewardError):
    """A reply announces more than is read."""


class FrameBuffer:
    """Cuts a stream of received bytes into payloads. Raises OversizedFrame for a payload above the limit."""

    def __init__(self, limit: int = MAX_REPLY_BYTES) -> None:
        self._bytes = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._bytes += data
        while len(self._bytes) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._bytes)
            if length > self._limit:
                raise OversizedFrame(f"a reply announces {length} bytes; the limit is {self._limit}")
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            yield payload


def encode_verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    """A verdict as JSON types; None (does not apply) stays None."""
    if verdict is None:
        return None
    tokens = verdict.token_values
    return {
        "kind": verdict.kind.value,
        "value": verdict.value,
        "reason": verdict.reason[:_MAX_REASON],
        "parts": dict(verdict.parts),
        "verifier": verdict.verifier,
        "version": verdict.version,
        "seconds": verdict.seconds,
        "token_values": None if tokens is None else [None if math.isnan(v) else float(v) for v in tokens],
    }


def decode_verdict(data: Any, *, verifier: str, version: str, num_tokens: int | None) -> Verdict | None:
    """A verdict from a reply. Raises RewardError for whatever breaks the contract."""
    if data is None:
        return None
    if not isinstance(data, dict) or data.get("kind") not in {kind.value for kind in VerdictKind}:
        raise RewardError(f"verifier {verifier}: the reply {str(data)[:80]!r} is no verdict")
    kind = VerdictKind(data["kind"])
    value = data.get("value")
    if (value is None) != (kind is VerdictKind.NO_REWARD):
        raise RewardError(f"verifier {verifier}: a verdict of kind {kind.value} with the value {value!r}")
    parts = data.get("parts") or {}
    if not isinstance(parts, dict) or len(parts) > _MAX_PARTS:
        raise RewardError(
            f"verifier {verifier}: the parts of a verdict are at most {_MAX_PARTS} named numbers"
        )
    return Verdict(
        kind=kind,
        value=None if value is None else checked_value(value, verifier=verifier),
        reason=printable(str(data.get("reason", ""))[:_MAX_REASON])[:_MAX_REASON],
        parts={str(name): checked_value(part, verifier=verifier) for name, part in parts.items()},
        verifier=str(data.get("verifier") or verifier),
        version=str(data.get("version") or version),
        seconds=checked_value(data.get("seconds", 0.0), verifier=verifier),
        token_values=_token_values(data.get("token_values"), verifier, num_tokens),
    )


def _token_values(values: Any, verifier: str, num_tokens: int | None) -> np.ndarray | None:
    if values is None:
        return None
    if not isinstance(values, list) or (num_tokens is not None and len(values) != num_tokens):
        shown = len(values) if isinstance(values, list) else type(values).__name__
        raise RewardError(f"verifier {verifier}: {shown} token values for a response of {num_tokens} tokens")
    given = [math.nan if value is None else checked_value(value, verifier=verifier) for value in values]
    return np.asarray(given, dtype=np.float32)


def parse_reply(payload: bytes) -> dict[str, Any]:
    """A reply's JSON object. Raises RewardError for anything else."""
    try:
        reply = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"a verifier's reply is no JSON: {str(error)[:120]}") from error
    if not isinstance(reply, dict):
        raise RewardError(f"a verifier's reply is a {type(reply).__name__}, not an object")
    return reply
