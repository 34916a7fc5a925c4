"""Rows of a file of JSON lines, one at a time, and how far the file could be read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST = 2**26
"""Bytes of a row; what is longer is no row of ours, and is not kept in memory."""


@dataclasses.dataclass
class Reading:
    """What was found in one file."""

    name: str
    is_there: bool = True
    lines: int = 0
    unread: int = 0
    """Lines that are no JSON object: cut in the middle, damaged, or longer than LONGEST."""
    first_unread: int | None = None
    """The number of the first of them, from 1."""

    def notes(self) -> list[str]:
        """Sentences on what is missing; none where all is there."""
        if not self.is_there:
            return [f"{self.name} is not there."]
        if not self.lines:
            return [f"{self.name} is empty."]
        if self.unread:
            where = "cut in its middle or damaged"
            return [
                f"{self.name}: {self.unread} of {self.lines} lines are no rows ({where}), first line {self.first_unread}."
            ]
        return []


def rows(path: Path, reading: Reading) -> Iterator[dict[str, Any]]:
    """The rows in order, and in `reading` what was found; an absent file has none."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, IsADirectoryError):
        reading.is_there = False
        return
    with file:
        while line := file.readline(LONGEST):
            reading.lines += 1
            row = None if len(line) == LONGEST else _parsed(line)
            while len(line) == LONGEST and not line.endswith(b"\n"):
                line = file.readline(LONGEST)
            if row is not None:
                yield row
                continue
            reading.unread += 1
            reading.first_unread = reading.first_unread or reading.lines


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_float=_number, parse_constant=str)
    except (ValueError, RecursionError):  # cut, of another encoding, or brackets without end
        return None
    return row if isinstance(row, dict) else None


def _number(text: str) -> float | str:
    """Its own text where it is beyond all numbers."""
    value = float(text)
    return value if math.isfinite(value) else text
