"""Frames, the messages between two processes: a length, then bytes.

Requests go out pickled from the side that trusts itself, or as JSON; replies come back as JSON with a size limit, because a process
that runs somebody's code, or reads what a model wrote, may have been harmed by it.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

from mrl.errors import MrlError

MAX_REPLY_BYTES = 8 * 2**20
_HEADER = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """Return the payload after its length."""
    return _HEADER.pack(len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next payload of a blocking stream; None at its end."""
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


class BadReply(MrlError, RuntimeError):
    """A process replied with something that is not read."""


class OversizedReply(BadReply):
    """A reply announces more than is read."""


class FrameBuffer:
    """Cuts a stream of received bytes into payloads. Raises OversizedReply for a payload above the limit."""

    def __init__(self, limit: int = MAX_REPLY_BYTES) -> None:
        self._bytes = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._bytes += data
        while len(self._bytes) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._bytes)
            if length > self._limit:
                raise OversizedReply(f"a reply announces {length} bytes; the limit is {self._limit}")
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            yield payload


def parse_reply(payload: bytes) -> dict[str, Any]:
    """Return a reply's JSON object. Raises BadReply for anything else."""
    try:
        reply = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"the reply is not valid JSON: {str(error)[:120]}") from error
    if not isinstance(reply, dict):
        raise BadReply(f"the reply is a JSON {type(reply).__name__}, not an object")
    return reply
