"""Rows of a file of JSON lines, one at a time, and how far the file could be read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mrl.errors import DataError

LONGEST = 2**26
"""Bytes of a row; what is longer is no row of ours, and is not kept in memory."""


@dataclasses.dataclass
class ReadSummary:
    """What was found in one file."""

    name: str
    is_there: bool = True
    lines: int = 0
    unread: int = 0
    """Lines that are no rows: cut in the middle, damaged, longer than LONGEST, or of another file."""
    first_unread: int | None = None
    """The number of the first of them, from 1."""

    def pass_over(self) -> None:
        """Counts the line that was read last as one that is no row."""
        self.unread += 1
        self.first_unread = self.first_unread or self.lines

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


def read_log_rows(path: Path, reading: ReadSummary) -> Iterator[dict[str, Any]]:
    """Yield the rows in order, and count in `reading` what was found.

    An absent file has none, nor has one that is not a plain file: a pipe would be waited for. DataError if the file may not be read.
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
    """Yield the rows of a file; a line longer than LONGEST counts once as one that is no row."""
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
    """The row of one line; None where it is none."""
    try:
        row = json.loads(line, parse_float=_number, parse_constant=str)
    except (ValueError, RecursionError):  # cut, of another encoding, or brackets without end
        return None
    return row if isinstance(row, dict) else None


def _number(text: str) -> float | str:
    """Its own text where it is beyond all numbers."""
    value = float(text)
    return value if math.isfinite(value) else text
