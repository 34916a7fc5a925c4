"""Connections to the model that pass through a sandbox's own connection, from its server to its client.

The server's end accepts those of the sandbox's door; the client's end connects to the gateway. So the machine
that trains accepts no connection, and the sandbox's machine needs none to it.

| waits for | unblocked by |
|---|---|
| bytes of a connection | the program, the gateway |
| room in a connection | the same; a connection that takes nothing for STALLED_SECONDS is closed |
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import struct
from collections.abc import Awaitable, Callable

from websockets.exceptions import ConnectionClosed

from mrl.agents.sandboxes.door import MAX_CONNECTIONS
from mrl.agents.sandboxes.remote.sandbox_messages import CLOSED, ENDED, OPENED, PASSED

STALLED_SECONDS = 60.0
_NUMBER = struct.Struct(">I")
_READ_BYTES = 64 << 10

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclasses.dataclass(slots=True)
class _Connection:
    writer: asyncio.StreamWriter
    is_over_here: bool = False
    """It was read to its end."""
    is_over_there: bool = False
    """The other end's connection was read to its end."""


class Tunnel:
    """One end of all connections of a sandbox. Its methods belong to one event loop."""

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        connect: Callable[[], Awaitable[Streams]] | None = None,
    ) -> None:
        """`send` sends a message; `connect` answers an OPENED. Without it this end opens the connections."""
        self._sends, self._connect = send, connect
        self._is_closed = False
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a connection on, to its end."""
        if self._is_closed:
            writer.close()
            return
        number = next(self._numbers)
        self._connections[number] = _Connection(writer)
        await self._send(_message(OPENED, number))
        self._begin(number, reader)

    async def take(self, message: bytes) -> None:
        """Take a message of the other end. Raises ValueError for one that is malformed."""
        if len(message) < 1 + _NUMBER.size:
            raise ValueError("a message without a number")
        kind, (number,), data = message[:1], _NUMBER.unpack_from(message, 1), message[1 + _NUMBER.size :]
        connection = self._connections.get(number)
        if kind == OPENED:
            if connection is not None or self._connect is None:
                raise ValueError(f"an unexpected connection {number}")
            await self._open(number, self._connect)
        elif kind == CLOSED:
            self._drop(number)
        elif connection is None:
            return  # this end has closed it
        elif kind == PASSED:
            await self._write(number, connection, data)
        elif kind == ENDED:
            connection.is_over_there = True
            with contextlib.suppress(OSError):
                connection.writer.write_eof()
            self._drop_if_over(number)
        else:
            raise ValueError(f"a message of kind {kind!r}")

    async def close(self) -> None:
        """Close all connections, and those that still come."""
        self._is_closed = True
        for number in list(self._connections):
            self._drop(number)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionClosed):  # who receives the messages sees it
            await self._sends(message)

    async def _open(self, number: int, connect: Callable[[], Awaitable[Streams]]) -> None:
        try:
            if len(self._connections) >= MAX_CONNECTIONS:
                raise OSError("too many connections")
            reader, writer = await connect()
        except OSError:
            await self._send(_message(CLOSED, number))
            return
        self._connections[number] = _Connection(writer)
        self._begin(number, reader)

    def _begin(self, number: int, reader: asyncio.StreamReader) -> None:
        task = asyncio.ensure_future(self._forward(number, reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, number: int, reader: asyncio.StreamReader) -> None:
        """Pass on what a connection says."""
        try:
            while data := await reader.read(_READ_BYTES):
                await self._send(_message(PASSED, number) + data)
        except OSError:
            await self._give_up(number)
            return
        if (connection := self._connections.get(number)) is not None:
            await self._send(_message(ENDED, number))
            connection.is_over_here = True
            self._drop_if_over(number)

    async def _write(self, number: int, connection: _Connection, data: bytes) -> None:
        try:
            connection.writer.write(data)
            async with asyncio.timeout(STALLED_SECONDS):
                await connection.writer.drain()
        except OSError:  # also TimeoutError
            await self._give_up(number)

    async def _give_up(self, number: int) -> None:
        if number in self._connections:
            self._drop(number)
            await self._send(_message(CLOSED, number))

    def _drop_if_over(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None and connection.is_over_here and connection.is_over_there:
            self._drop(number)

    def _drop(self, number: int) -> None:
        if (connection := self._connections.pop(number, None)) is not None:
            connection.writer.close()


def _message(kind: bytes, number: int) -> bytes:
    return kind + _NUMBER.pack(number)
