"""Handshake between the run's processes: the connecting side proves knowledge of the run's secret.

Nothing else is read from a connection before. The secret is never sent over it; Ray gives it to both sides.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets

from mrl.processes.framing import FrameStream, frame
from mrl.rollout import engine_messages


async def prove(stream: FrameStream, secret: bytes) -> None:
    """Answer the challenge of the listening side.

    Raises:
        ConnectionError: It sends no challenge.
        MsgspecError: Its data is not a message.
    """
    challenge = engine_messages.decode(await stream.read() or b"")
    if not isinstance(challenge, engine_messages.Challenge):
        raise ConnectionError("the listening process does not send a challenge")
    stream.write(
        engine_messages.encode(engine_messages.Proof(engine_messages.proof_of(secret, challenge.nonce)))
    )


async def is_proved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> bool:
    """Challenge the connecting side; return True if it knows the secret. Reads no more than a proof."""
    nonce = secrets.token_bytes(32)
    writer.write(frame(engine_messages.encode(engine_messages.Challenge(nonce))))
    size = len(frame(engine_messages.encode(engine_messages.Proof(bytes(32)))))
    proof = engine_messages.decode((await reader.readexactly(size))[4:])
    if isinstance(proof, engine_messages.Proof):
        return hmac.compare_digest(proof.digest, engine_messages.proof_of(secret, nonce))
    return False
