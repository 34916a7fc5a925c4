"""Messages of a program's requests, of which only what is new is read.

A program sends its whole history with each request. An item of it (a message, a call, a tool's result) that
an earlier request had at the same place is recognised by its bytes, and neither parsed nor read again.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import xxhash

from mrl.agents.tool_calls import ToolCall

_KEPT = 8
"""Histories to keep: a program with sub-agents alternates between some."""

Role = Literal["system", "user", "assistant", "tool"]


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """ChatMessage of a request, from any API."""

    role: Role
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools, if the role is assistant."""
    call_id: str = ""
    """Id of the call that a tool's message answers."""
    name: str = ""
    """Tool that a tool's message is from, if known."""

    @property
    def key(self) -> str:
        """Identity of the message: clients drop thoughts, and change ids and space at the ends."""
        text = f"{self.role}\0{self.text.strip()}"
        if not self.calls:
            return text
        return f"{text}\0{json.dumps([[call.name, call.arguments] for call in self.calls], sort_keys=True)}"


ReadItem = Callable[[Any, list[ChatMessage]], None]
"""Read an item: append its messages to those before it, or add it to the last one."""


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """Messages of a request, with the identity of each number of them."""

    messages: list[ChatMessage]
    digests: list[bytes]
    """Identity of the request's tools and first 0, 1, 2, ... messages."""
    items: list[bytes]
    """Hash of each item's bytes; the first one's is that of what comes before them."""
    ends: list[tuple[int, ChatMessage | None]]
    """Number of messages after each item, and the last of them, to which the next item may add."""


class Histories:
    """Latest histories of one program."""

    def __init__(self) -> None:
        self._kept: collections.deque[History] = collections.deque(maxlen=_KEPT)

    def read(
        self, items: Sequence[msgspec.Raw | bytes], read_item: ReadItem, *, system: str, tools: str, api: str
    ) -> History:
        """Return the messages of a request.

        Args:
            items: JSON of each item.
            system: Text before them.
            tools: Identity of the request's tools.
            api: Name of the API, whose items have a form of their own.
        """
        hashes = [xxhash.xxh3_128_digest(f"{api}\0{tools}\0{system}".encode())]
        hashes += map(xxhash.xxh3_128_digest, items)
        kept = max(self._kept, key=lambda one: (_shared(one.items, hashes), len(one.items)), default=None)
        count = 0 if kept is None else _shared(kept.items, hashes)
        if kept is None or count == 0:
            messages = [ChatMessage("system", system)] if system else []
            digests, count = [hashlib.blake2b(tools.encode(), digest_size=16).digest()], 1
            ends = [_end(messages)]
        else:
            number, last = kept.ends[count - 1]
            messages = [*kept.messages[: number - 1], last] if last is not None else []
            digests, ends = kept.digests[: max(1, number)], kept.ends[:count]
        for item in items[count - 1 :]:
            read_item(msgspec.json.decode(item), messages)
            ends.append(_end(messages))
        for message in messages[len(digests) - 1 :]:
            digests.append(following_digest(digests[-1], message))
        history = History(messages, digests, hashes, ends)
        if kept is not None and count == len(kept.items):
            self._kept.remove(kept)  # the new one begins with it
        self._kept.append(history)
        return history


def following_digest(before: bytes, message: ChatMessage) -> bytes:
    """Return the identity of messages that `before` identifies and one after them."""
    return hashlib.blake2b(before + message.key.encode(), digest_size=16).digest()


def add_system(text: str, messages: list[ChatMessage]) -> None:
    """Append a system message; those at the start become one, because templates take one."""
    if text and len(messages) == 1 and messages[0].role == "system":
        messages[0] = ChatMessage("system", f"{messages[0].text}\n\n{text}")
    elif text:
        messages.append(ChatMessage("system", text))


def add_result(text: str, call_id: str, messages: list[ChatMessage], name: str = "") -> None:
    """Append a tool's result, with the name of the tool that its call had."""
    turn = next((message for message in reversed(messages) if message.role == "assistant"), None)
    names = (call.name for call in turn.calls if call.id == call_id) if turn and call_id else ()
    messages.append(ChatMessage("tool", text, (), call_id, name or next(iter(names), "")))


def _end(messages: Sequence[ChatMessage]) -> tuple[int, ChatMessage | None]:
    return len(messages), messages[-1] if messages else None


def _shared(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Return the number of equal hashes at the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))
