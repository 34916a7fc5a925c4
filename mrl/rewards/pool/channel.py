"""A worker's two ends of the pipes to who started it, and bytes that wait for a pipe to take them."""

from __future__ import annotations

import contextlib
import os


class Outbox:
    """What is to be written to a descriptor that never blocks."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._out = bytearray()
        os.set_blocking(descriptor, False)

    def send(self, data: bytes) -> None:
        """Queue bytes and write what the pipe takes now."""
        self._out += data
        self.flush()

    def flush(self) -> None:
        """Write queued bytes; a closed pipe shows as the end of what comes back."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._out:
                del self._out[: os.write(self.descriptor, self._out[: 1 << 16])]

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)


def read_some(descriptor: int) -> bytes | None:
    """The bytes that are there, of a descriptor that does not block; None at the end of the stream."""
    try:
        return os.read(descriptor, 1 << 16) or None
    except BlockingIOError:
        return b""


def take_over() -> tuple[int, int]:
    """Standard input and output under other numbers, as (requests, replies). What is printed from now on goes to standard error,
    and there is nothing to read, so that no code that runs here reaches the channel."""
    replies, requests = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests, replies
