"""Frames arrive as they were sent, however the socket cuts them, and wait in the socket if nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from mrl.processes.framing import FrameStream, frame

PAYLOADS = [b"", b"x", b"", bytes(range(256)) * 4000, b"yz", *(bytes([n]) * 300_000 for n in range(9)), b""]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def with_stream(talk: Talk, use: Callable[[FrameStream], Awaitable[None]]) -> None:
    """Connect to a server that sends so, and use the stream."""
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with asyncio.timeout(60), server:
        stream = await FrameStream.connect(*server.sockets[0].getsockname())
        await use(stream)
        stream.close()


@pytest.mark.parametrize("piece", [3, 70_001, 1 << 22])
def test_frames_come_as_they_were_sent_whatever_the_pieces(piece: int) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b"".join(map(frame, PAYLOADS))
        for start in range(0, len(data), piece if piece > 3 else len(data)):
            writer.write(data[start : start + piece])
            await writer.drain()
        if piece == 3:  # the header of the first frame in two pieces, then the rest
            writer.write(data[3:])
        writer.close()

    async def use(stream: FrameStream) -> None:
        for payload in PAYLOADS:
            assert await stream.read() == payload
        assert await stream.read() is None and await stream.read() is None

    uvloop.run(with_stream(talk, use))


def test_what_nobody_reads_stays_with_its_sender() -> None:
    """At most MOST_UNREAD payloads, and what the kernel takes, are here before the first read."""
    sent, many, size = 0, 400, 1 << 20

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for number in range(many):
            writer.write(frame(bytes([number % 256]) * size))
            await writer.drain()
            sent = number + 1
        writer.close()

    async def use(stream: FrameStream) -> None:
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < many // 2, "the sender was held up"
        for number in range(many):
            payload = await stream.read()
            assert payload is not None and len(payload) == size and payload[0] == payload[-1] == number % 256
        assert await stream.read() is None

    uvloop.run(with_stream(talk, use))


def test_a_frame_that_breaks_off_is_the_end_and_what_is_written_arrives() -> None:
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readexactly(len(frame(b"question"))))
        writer.write(frame(b"whole") + frame(b"broken")[:-1])
        writer.close()

    async def use(stream: FrameStream) -> None:
        stream.write(b"question")
        assert await stream.read() == b"whole" and await stream.read() is None

    uvloop.run(with_stream(talk, use))
    assert heard == [frame(b"question")]
