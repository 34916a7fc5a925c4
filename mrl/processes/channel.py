"""Both ends of the pipes between a worker and who started it, and bytes that wait for them to take them."""

from __future__ import annotations

import abc
import contextlib
import os
import pickle
from collections.abc import Iterator
from typing import Any

from mrl.processes.framing import MAX_REPLY_BYTES, FrameBuffer, frame, parse_reply


class Outbox:
    """What is to be written to a descriptor that never blocks."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._out = bytearray()
        os.set_blocking(descriptor, False)

    def send(self, data: bytes) -> None:
        """Write what the pipe takes now, after what is queued, and queue the rest."""
        if self._out:
            self._out += data
            self.flush()
            return
        num_written = 0
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            num_written = os.write(self.descriptor, data)
        self._out += memoryview(data)[num_written:]

    def flush(self) -> None:
        """Write queued bytes; a lost end shows as the end of what comes back."""
        try:
            while self._out:
                del self._out[: os.write(self.descriptor, self._out[: 1 << 16])]
        except (BlockingIOError, BrokenPipeError):
            pass

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)


class ErrorTail:
    """The end of what a process writes to its standard error."""

    def __init__(self, descriptor: int, kept_bytes: int = 2000) -> None:
        """The descriptor does not block from now on."""
        os.set_blocking(descriptor, False)
        self.descriptor, self._kept, self._text = descriptor, kept_bytes, b""

    def read(self) -> bool:
        """Keep the last bytes of what is there; False at its end."""
        data = read_some(self.descriptor)
        self._text = (self._text + (data or b""))[-self._kept :]
        return data is not None

    def last_words(self, characters: int = 400) -> str:
        """Return the end of the text, printable."""
        self.read()
        text = self._text.decode("utf-8", "replace").strip()
        return ascii(text[-characters:]) if text else "(nothing on its standard error)"


class Line(abc.ABC):
    """The end of who started a worker: messages to it, and the bytes of what it replies."""

    def __init__(self, requests: int, replies: int, *, limit: int = MAX_REPLY_BYTES) -> None:
        """Descriptors that do not block from now on; `limit`: bytes of a reply."""
        os.set_blocking(replies, False)
        self.requests, self.replies = requests, replies
        self._buffer, self._out = FrameBuffer(limit), Outbox(requests)

    def send(self, message: Any) -> None:
        """Queue a message, pickled, and write what is taken now."""
        self.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def send_bytes(self, message: bytes) -> None:
        """The same of a message that is bytes already."""
        self._out.send(frame(message))

    def flush(self) -> None:
        """Write what is queued; a lost end shows as the end of the replies."""
        self._out.flush()

    @property
    def has_unsent(self) -> bool:
        return self._out.has_unsent

    def read_replies(self) -> Iterator[dict[str, Any]]:
        """Yield the replies that have arrived.

        Raises:
            BadReply: One of them cannot be read.
            EOFError: No more will come.
        """
        data = read_some(self.replies)
        if data is None:
            raise EOFError
        yield from map(parse_reply, self._buffer.feed(data))

    @abc.abstractmethod
    def finish(self) -> None:
        """Tells it that nothing more will come."""

    @abc.abstractmethod
    def end(self) -> object:
        """Kills it; how it ended, as a text for people."""


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
