"""Both ends of the pipes between a worker and the process that started it, with queues of unsent bytes."""

from __future__ import annotations

import abc
import contextlib
import os
import pickle
from collections.abc import Iterator
from typing import Any

from mrl.processes.framing import MAX_REPLY_BYTES, FrameBuffer, frame, parse_reply


class Outbox:
    """Queue of bytes to write to a non-blocking descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._out = bytearray()
        os.set_blocking(descriptor, False)

    def send(self, data: bytes) -> None:
        """Write the data after what is queued, and queue what the pipe does not take now."""
        if self._out:
            self._out += data
            self.flush()
            return
        num_written = 0
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            num_written = os.write(self.descriptor, data)
        self._out += memoryview(data)[num_written:]

    def flush(self) -> None:
        """Write queued bytes; a closed pipe is not an error here, the reader of replies sees it as EOF."""
        try:
            while self._out:
                del self._out[: os.write(self.descriptor, self._out[: 1 << 16])]
        except (BlockingIOError, BrokenPipeError):
            pass

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)


class ErrorTail:
    """Last bytes of a process's standard error."""

    def __init__(self, descriptor: int, kept_bytes: int = 2000) -> None:
        """Set the descriptor non-blocking."""
        os.set_blocking(descriptor, False)
        self.descriptor, self._kept, self._text = descriptor, kept_bytes, b""

    def read(self) -> bool:
        """Read what is available and keep the last bytes; return False at EOF."""
        data = read_some(self.descriptor)
        self._text = (self._text + (data or b""))[-self._kept :]
        return data is not None

    def last_words(self, characters: int = 400) -> str:
        """Return the end of the text, printable."""
        self.read()
        text = self._text.decode("utf-8", "replace").strip()
        return ascii(text[-characters:]) if text else "(nothing on its standard error)"


class WorkerPipes(abc.ABC):
    """Parent's end of the pipes to a worker: sends messages, reads replies."""

    def __init__(self, requests: int, replies: int, *, limit: int = MAX_REPLY_BYTES) -> None:
        """Set both descriptors non-blocking; `limit`: maximum bytes of a reply."""
        os.set_blocking(replies, False)
        self.requests, self.replies = requests, replies
        self._buffer, self._out = FrameBuffer(limit), Outbox(requests)

    def send(self, message: Any) -> None:
        """Pickle a message, write what the pipe takes now, and queue the rest."""
        self.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def send_bytes(self, message: bytes) -> None:
        """Send a message that is already bytes."""
        self._out.send(frame(message))

    def flush(self) -> None:
        """Write queued bytes; a closed pipe shows as EOF of the replies."""
        self._out.flush()

    @property
    def has_unsent(self) -> bool:
        return self._out.has_unsent

    def read_replies(self) -> Iterator[dict[str, Any]]:
        """Yield the replies that have arrived.

        Raises:
            BadReply: A reply cannot be parsed.
            EOFError: The worker closed its end.
        """
        data = read_some(self.replies)
        if data is None:
            raise EOFError
        yield from map(parse_reply, self._buffer.feed(data))

    @abc.abstractmethod
    def finish(self) -> None:
        """Signal the end of the requests."""

    @abc.abstractmethod
    def end(self) -> object:
        """Kill the worker; return how it ended, printable with str()."""


def read_some(descriptor: int) -> bytes | None:
    """Read the available bytes of a non-blocking descriptor; return None at EOF."""
    try:
        return os.read(descriptor, 1 << 16) or None
    except BlockingIOError:
        return b""


def take_over_stdio() -> tuple[int, int]:
    """Move standard input and output to new descriptors, returned as (requests, replies). Then prints go to
    standard error and input is empty, so that no other code reaches the channel."""
    replies, requests = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests, replies
