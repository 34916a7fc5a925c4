"""Find what the chat template ignores, so that the model never reads it.

A chat template may silently ignore tools, a key of a message, or whole roles. To find out, render a row again
without the thing: if the text is the same, the template did not use it there. A thing that changed none of
the first rows with it is reported by name. A row's own argument counts as used if the template names it,
because its value may equal the template's default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from mrl.errors import DataError

Thing = tuple[str, ...]
"""The tools of a row, an argument of its own by name, or a message key of a role (role, key)."""

_TOOLS: Thing = ("tools",)
_TRIES = 20
"""Rows in which each thing is tried; what a template uses rarely depends on the row."""


Message = Mapping[str, Any]
Tools = list[dict[str, Any]] | None
Render = Callable[[tuple[Message, ...], Tools], str]


class TemplateUsage:
    """Search for what a template does not use; `names` are the words in it."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._tries: Counter[Thing] = Counter()
        self._used: set[Thing] = set()
        self._not_rendered = 0

    def check(
        self,
        messages: Sequence[Message],
        tools: Tools,
        arguments: Mapping[str, Any],
        render: Render,
        text: str,
    ) -> None:
        """Check a row and its text. `arguments` are the row's own template arguments; `render` renders other
        messages and tools with the rest of the row."""
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
        """Return `tools`, `role.key` and row arguments that no checked text shows."""
        return sorted(".".join(thing) for thing in self._tries.keys() - self._used)

    def count_unrendered(self, messages: Sequence[Message], tools: Any, arguments: Mapping[str, Any]) -> None:
        """Count a row that no template renders."""
        self._not_rendered += bool(tools or arguments or _further_keys(messages))

    def sentences(self) -> list[str]:
        """Return messages for the user; none if the model reads everything."""
        sentences = []
        if names := self.names():
            sentences.append(
                f"the chat template does not use {', '.join(names)}, so the model never reads it"
            )
        if self._not_rendered:
            sentences.append(
                f"{self._not_rendered} rows have tools, chat_template_kwargs or further message keys, but no "
                "template renders their prompt, so the model never reads them"
            )
        return sentences


def _further_keys(messages: Sequence[Message]) -> bool:
    """Return True if a message has more than its role and text."""
    return any(key not in ("role", "content") and not _is_empty(m[key]) for m in messages for key in m)


def _differs(render: Render, other: tuple[tuple[Message, ...], Tools], text: str) -> bool:
    try:
        return render(*other) != text
    except DataError:  # the template requires it
        return True


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _things(messages: Sequence[Message], tools: Tools) -> set[Thing]:
    keys: set[Thing] = {
        (m["role"], key) for m in messages for key in m if key != "role" and not _is_empty(m[key])
    }
    return keys | {_TOOLS} if tools else keys


def _without(thing: Thing, messages: Sequence[Message], tools: Tools) -> tuple[tuple[Message, ...], Tools]:
    """Return the row without the thing."""
    if thing == _TOOLS:
        return tuple(messages), None
    role, key = thing
    return tuple(_left_out(m, key) if m["role"] == role else m for m in messages), tools


def _left_out(message: Message, key: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != key}
