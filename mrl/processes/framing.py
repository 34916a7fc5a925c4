"""Frames, the messages between two processes: a length, then bytes.

Requests are pickled or JSON. Replies are JSON with a size limit, because the process that sends them runs
untrusted code or reads model output and may be compromised.
"""

from __future__ import annotations

import asyncio
import collections
import json
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import numpy as np

from mrl.errors import MrlError

MAX_REPLY_BYTES = 8 * 2**20
_HEADER = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """Return the payload with its length in front."""
    return _HEADER.pack(len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next payload of a blocking stream; None at EOF."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    payload = stream.read(length)
    return payload if len(payload) == length else None


async def read_frame_async(stream: asyncio.StreamReader) -> bytes | None:
    """Return the next payload of an asyncio stream; None at EOF."""
    try:
        (length,) = _HEADER.unpack(await stream.readexactly(_HEADER.size))
        return await stream.readexactly(length)
    except asyncio.IncompleteReadError:
        return None


class FrameStream(asyncio.BufferedProtocol):
    """An asyncio connection that reads and writes frames. Large payloads are received without a copy."""

    MOST_UNREAD = 4
    """Unread payloads at which reading from the socket is paused."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._header, self._payload = memoryview(bytearray(_HEADER.size)), memoryview(b"")
        self._num_read, self._in_payload = 0, False
        """Bytes read of the current part, and whether it is the payload or the header."""
        self._unread: collections.deque[memoryview] = collections.deque()
        self._reader: asyncio.Future[None] | None = None
        self._ended = False
        self._error: Exception | None = None

    @classmethod
    async def connect(cls, host: str, port: int) -> FrameStream:
        """Connect to a listening socket. Raises OSError if nothing listens there."""
        return (await asyncio.get_running_loop().create_connection(cls, host, port))[1]

    async def read(self) -> memoryview | None:
        """Return the next payload; None at EOF. Only one caller at a time."""
        while not self._unread and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._unread:
            if self._error is not None:
                raise self._error
            return None
        if len(self._unread) == self.MOST_UNREAD and not self._ended:
            self._transport.resume_reading()
        return self._unread.popleft()

    def write(self, payload: bytes) -> None:
        """Send a frame; bytes that the socket does not take now are buffered."""
        self._transport.write(frame(payload))

    def close(self) -> None:
        """Close the connection after the buffered bytes are sent."""
        self._transport.close()

    # -- called by the event loop ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return (self._payload if self._in_payload else self._header)[self._num_read :]

    def buffer_updated(self, nbytes: int) -> None:
        self._num_read += nbytes
        if self._num_read == len(self._payload if self._in_payload else self._header):
            self._num_read = 0
            if not self._in_payload:
                (length,) = _HEADER.unpack(self._header)
                # unlike a bytearray, not zeroed first
                self._payload = memoryview(np.empty(length, np.uint8))
            self._in_payload = not self._in_payload and len(self._payload) > 0
            if not self._in_payload:
                self._unread.append(self._payload)
                self._payload = memoryview(b"")
                if len(self._unread) == self.MOST_UNREAD:
                    self._transport.pause_reading()
                self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, exc
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class BadReply(MrlError, RuntimeError):
    """A process sent a reply that cannot be parsed."""


class OversizedReply(BadReply):
    """A reply announces more bytes than the limit."""


class FrameBuffer:
    """Splits received bytes into payloads. Raises OversizedReply for a payload above the limit."""

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
