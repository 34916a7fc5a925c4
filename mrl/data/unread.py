"""What of the rows leaves no trace in the text the model reads.

A chat template may pass over tools, a key of a message, or whole roles, and says nothing. Whether it does is
found by rendering a row once more without the thing: the same text means that the template did not use it
there. A thing that changed none of the first rows that have it is reported by name. A row's own argument
counts as used where the template names it, because its value may be what the template takes anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from mrl.errors import DataError

Thing = tuple[str, ...]
"""The tools of a row, an argument of its own by name, or a key of the messages of a role (role, key)."""

_TOOLS: Thing = ("tools",)
_TRIES = 20
"""Rows that each thing is looked for in; a template decides by what is there, rarely by which row it is."""


Message = Mapping[str, Any]
Tools = list[dict[str, Any]] | None
Render = Callable[[tuple[Message, ...], Tools], str]


class Unread:
    """Finds what a template does not use; `names` are the words in it."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._tries: Counter[Thing] = Counter()
        self._used: set[Thing] = set()
        self._not_rendered = 0

    def look(
        self,
        messages: Sequence[Message],
        tools: Tools,
        arguments: Mapping[str, Any],
        render: Render,
        text: str,
    ) -> None:
        """Take note of a row and its text. `arguments` are the row's own of the template; `render` gives the text of other
        messages and tools in the row's place."""
        for thing in _things(messages, tools):
            if thing not in self._used and self._tries[thing] < _TRIES:
                self._tries[thing] += 1
                if _differs(render, _without(thing, messages, tools), text):
                    self._used.add(thing)
        for name in arguments:
            self._tries[name,] += 1
            if name in self._names:
                self._used.add((name,))

    def names(self) -> list[str]:
        """`tools`, `role.key` and arguments of rows that no looked-at text shows."""
        return sorted(".".join(thing) for thing in self._tries.keys() - self._used)

    def pass_over(self, messages: Sequence[Message], tools: Any, arguments: Mapping[str, Any]) -> None:
        """Take note of a row that no template renders."""
        self._not_rendered += bool(tools or arguments or _further_keys(messages))

    def sentences(self) -> list[str]:
        """What a user is told; none where the model reads everything."""
        said = []
        if names := self.names():
            said.append(f"the chat template does not use {', '.join(names)}; the model reads none of it")
        if self._not_rendered:
            said.append(
                f"{self._not_rendered} rows have tools, chat_template_kwargs or further keys of a message and a prompt that no "
                "template renders; the model reads none of it"
            )
        return said


def _further_keys(messages: Sequence[Message]) -> bool:
    """Whether a message holds more than its role and its text."""
    return any(key not in ("role", "content") and not _is_empty(m[key]) for m in messages for key in m)


def _differs(render: Render, other: tuple[tuple[Message, ...], Tools], text: str) -> bool:
    try:
        return render(*other) != text
    except DataError:  # the template asks for it
        return True


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _things(messages: Sequence[Message], tools: Tools) -> set[Thing]:
    keys: set[Thing] = {
        (m["role"], key) for m in messages for key in m if key != "role" and not _is_empty(m[key])
    }
    return keys | {_TOOLS} if tools else keys


def _without(thing: Thing, messages: Sequence[Message], tools: Tools) -> tuple[tuple[Message, ...], Tools]:
    """The row as it would be without the thing."""
    if thing == _TOOLS:
        return tuple(messages), None
    role, key = thing
    return tuple(_left_out(m, key) if m["role"] == role else m for m in messages), tools


def _left_out(message: Message, key: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != key}
