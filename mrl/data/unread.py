"""What of the rows leaves no trace in the text the model reads.

A chat template may pass over tools, a key of a message, or whole roles, and says nothing. Whether it does is
found by rendering a row once more without the thing: the same text means that the template did not use it
there. A thing that changed none of the first rows that have it is reported by name. A row's own argument
counts as used where the template names it, because its value may be what the template takes anyway.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any

from mrl.data.row_shapes import DataRow
from mrl.errors import DataError

Thing = tuple[str, ...]
"""The tools of a row, an argument of its own by name, or a key of the messages of a role (role, key)."""

_TOOLS: Thing = ("tools",)
_TRIES = 20
"""Rows that each thing is looked for in; a template decides by what is there, rarely by which row it is."""


class Unread:
    """Finds what a template does not use. `render` is the text of a row; `names` are the words in the
    template."""

    def __init__(self, render: Callable[[DataRow], str], names: Set[str]) -> None:
        self._render = render
        self._names = names
        self._tries: Counter[Thing] = Counter()
        self._used: set[Thing] = set()

    def look(self, row: DataRow, text: str) -> None:
        """Takes note of a templated row and its text."""
        for thing in _things(row):
            if thing not in self._used and self._tries[thing] < _TRIES:
                self._tries[thing] += 1
                if self._differs(_without(thing, row), text):
                    self._used.add(thing)
        for name in row.chat_template_kwargs:
            self._tries[name,] += 1
            if name in self._names:
                self._used.add((name,))

    def names(self) -> list[str]:
        """`tools`, `role.key` and arguments of rows that no looked-at text shows."""
        return sorted(".".join(thing) for thing in self._tries.keys() - self._used)

    def _differs(self, row: DataRow, text: str) -> bool:
        try:
            return self._render(row) != text
        except DataError:  # the template asks for it
            return True


def further_keys(row: DataRow) -> bool:
    """Whether a message of the row holds more than its role and its text."""
    messages = () if isinstance(row.prompt, str) else row.prompt
    return any(key not in ("role", "content") and not _is_empty(m[key]) for m in messages for key in m)


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _things(row: DataRow) -> set[Thing]:
    assert not isinstance(row.prompt, str)
    keys: set[Thing] = {
        (m["role"], key) for m in row.prompt for key in m if key != "role" and not _is_empty(m[key])
    }
    return keys | {_TOOLS} if row.tools else keys


def _without(thing: Thing, row: DataRow) -> DataRow:
    """The row as it would be without the thing."""
    if thing == _TOOLS:
        return dataclasses.replace(row, tools=None)
    role, key = thing
    prompt = tuple(_left_out(m, key) if m["role"] == role else m for m in row.prompt)  # type: ignore[union-attr]
    return dataclasses.replace(row, prompt=prompt)


def _left_out(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != key}
