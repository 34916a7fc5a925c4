"""Print foreign text on a terminal: indented under a name, with control characters escaped."""

from __future__ import annotations

from collections.abc import Iterator


def terminal_text(name: str, text: object) -> Iterator[str]:
    """Yield the text, further lines indented under the first, with control characters escaped."""
    first, *remaining = str(text).split("\n")
    yield f"  {name}: {plain(first)}"
    yield from (f"    {plain(line)}" for line in remaining)


def plain(line: str) -> str:
    """Return the line with everything unprintable escaped.

    >>> plain(chr(27) + "[2J")
    '\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
