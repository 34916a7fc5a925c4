"""Read rows of a JSON Lines file one at a time, and record how much of it was readable."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mrl.errors import DataError

LONGEST = 2**26
"""Most bytes of a row; longer lines are not ours and are not kept in memory."""


@dataclasses.dataclass
class ReadSummary:
    """Summary of what was read of one file."""

    name: str
    is_there: bool = True
    lines: int = 0
    unread: int = 0
    """Lines that are not rows: cut, damaged, longer than LONGEST, or from another file."""
    first_unread: int | None = None
    """Number of the first of them, from 1."""

    def pass_over(self) -> None:
        """Count the last line as one that is not a row."""
        self.unread += 1
        self.first_unread = self.first_unread or self.lines

    def notes(self) -> list[str]:
        """Return sentences on what is missing; empty if nothing is."""
        if not self.is_there:
            return [f"{self.name} does not exist."]
        if not self.lines:
            return [f"{self.name} is empty."]
        if self.unread:
            where = "cut or damaged"
            return [
                f"{self.name}: {self.unread} of {self.lines} lines are not rows ({where}), first line "
                f"{self.first_unread}."
            ]
        return []


def read_log_rows(path: Path, reading: ReadSummary) -> Iterator[dict[str, Any]]:
    """Yield the rows in order, and count in `reading`.

    An absent file has none, nor has one that is not a plain file: reading a pipe would block. Raise DataError
    if reading fails.
    """
    if not path.is_file():
        reading.is_there = False
        return
    try:
        with path.open("rb") as file:
            yield from _rows(file, reading)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _rows(file: IO[bytes], reading: ReadSummary) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; a line longer than LONGEST counts once as unread."""
    is_too_long = False
    while line := file.readline(LONGEST):
        if not line.endswith(b"\n") and len(line) == LONGEST:
            is_too_long = True
            continue
        reading.lines += 1
        row = None if is_too_long else parsed(line)
        is_too_long = False
        if row is None:
            reading.pass_over()
        else:
            yield row
    if is_too_long:
        reading.lines += 1
        reading.pass_over()


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the row of one line; None if it is not one."""
    try:
        row = json.loads(line, parse_float=_number, parse_constant=str)
    except (ValueError, RecursionError):  # cut, another encoding, or too deeply nested
        return None
    return row if isinstance(row, dict) else None


def _number(text: str) -> float | str:
    """Return a finite number, or the text of one that overflows."""
    value = float(text)
    return value if math.isfinite(value) else text
