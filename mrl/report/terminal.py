"""Texts of others on a terminal: their lines beneath a name, and nothing in them steers it."""

from __future__ import annotations

from collections.abc import Iterator


def terminal_text(name: str, text: object) -> Iterator[str]:
    """The text, its further lines beneath the first; what would steer a terminal is escaped."""
    first, *rest = str(text).split("\n")
    yield f"  {name}: {plain(first)}"
    yield from (f"    {plain(line)}" for line in rest)


def plain(line: str) -> str:
    """The line with everything that is not printed escaped.

    >>> plain(chr(27) + "[2J")
    '\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
