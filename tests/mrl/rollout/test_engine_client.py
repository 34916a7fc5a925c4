"""The driver's client with a scripted engine: messages that no engine of ours sends, and lost routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mrl.processes.framing import frame, read_frame_async
from mrl.rollout import engine_messages
from mrl.rollout.engine_client import EngineClient, EngineLost
from mrl.rollout.request import Completion, GenerationRequest
from mrl.routes import RouteRows, Routes
from mrl.samples import Status

REQUEST = GenerationRequest("0.0", np.ones(3, np.int32), 1, 4)
ROUTED = engine_messages.ended(
    [
        Completion(
            "0.0",
            np.ones(2, np.int32),
            np.zeros(2, np.float32),
            (),
            Status.FINISHED,
            routes=Routes((RouteRows(np.zeros((4, 1, 1), np.uint8), 0, 4),)),
        )
    ],
    lambda block: 3,
)


async def with_engine(
    says: Callable[[Any], bytes], action: Callable[[EngineClient], Any], block_of: Any = None
) -> EngineClient:
    """Connect to an engine that replies so, run the action, and return the client."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(engine_messages.encode(engine_messages.Challenge(bytes(32)))))
        while (data := await read_frame_async(reader)) is not None:
            writer.write(says(engine_messages.decode(data)))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    lost: list[str] = []
    client = EngineClient("engine 0", on_lost=lost.append, block_of=block_of)
    async with server, asyncio.timeout(60):
        await client.connect(server.sockets[0].getsockname(), b"secret")
        try:
            await action(client)
        finally:
            client.give_up("the test ended")
    assert lost == [client.lost], "told once"
    return client


def answering(
    kind: type[engine_messages.EngineMessage], message: engine_messages.EngineMessage
) -> Callable[[Any], bytes]:
    return lambda heard: frame(engine_messages.encode(message)) if isinstance(heard, kind) else b""


async def gone(number: int) -> Any:
    raise RuntimeError(f"block {number} is gone")


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (ROUTED, "block 3 is gone"),
        (engine_messages.Resume(True), "engine 0 sent an unexpected Resume"),
        (engine_messages.Failure("PeerLost", "PeerLost: x"), "engine 0 failed: PeerLost: x"),
    ],
    ids=["routes", "foreign", "failure"],
)
def test_what_ends_the_connection_ends_its_requests(message: engine_messages.EngineMessage, why: str) -> None:
    """No request waits for a lost response; the pause under way ends too."""

    async def told(client: EngineClient) -> None:
        pausing = asyncio.ensure_future(client.pause(snapshot=True))
        with pytest.raises(EngineLost, match=why):
            await client.submit(REQUEST)
        with pytest.raises(EngineLost, match=why):
            await pausing
        with pytest.raises(EngineLost, match=why):
            await client.submit(REQUEST)

    client = asyncio.run(with_engine(answering(engine_messages.Submit, message), told, gone))
    assert (client.failure is not None) == isinstance(message, engine_messages.Failure)


def test_a_pause_whose_routes_are_gone_ends_the_connection() -> None:
    async def told(client: EngineClient) -> None:
        with pytest.raises(EngineLost, match="block 3 is gone"):
            await client.pause(snapshot=True)
        assert "block 3 is gone" in client.lost

    asyncio.run(
        with_engine(answering(engine_messages.Pause, engine_messages.PauseDone(1, 4, ROUTED)), told, gone)
    )


def test_routes_come_by_the_number_of_their_block() -> None:
    async def handle(number: int) -> str:
        return f"handle {number}"

    async def told(client: EngineClient) -> None:
        completion = await client.submit(REQUEST)
        assert completion.routes == Routes((RouteRows("handle 3", 0, 4),))

    asyncio.run(with_engine(answering(engine_messages.Submit, ROUTED), told, handle))
