"""Rows of a file of JSON lines, one at a time, also while it is written, and how far the file could be read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mrl.errors import DataError

LONGEST = 2**26
"""Bytes of a row; what is longer is no row of ours, and is not kept in memory."""


@dataclasses.dataclass
class Reading:
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


class Tail:
    """A file of rows that may still be written: each call of `rows` gives what is whole since the last one."""

    def __init__(self, path: Path, reading: Reading | None = None, *, most: int | None = None) -> None:
        """`most`: bytes before the end at which a longer file is begun, at the first whole row behind them."""
        self.path, self.reading = path, reading or Reading(path.name)
        self.skipped, self.behind, self.unfinished = 0, 0, 0
        """Bytes before the beginning; bytes that are still to be read; of these, those of a last line without its end."""
        self._most, self._offset, self._file_id = most, 0, -1
        self._too_long = False

    def replaced(self) -> bool:
        """Whether the file is another one than before, or shorter than what was read of it: it has to be read again."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return self._file_id >= 0 and (found.st_ino != self._file_id or found.st_size < self._offset)

    def rows(self, most: int | None = None) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(offset, length in bytes, row) of further rows, in about `most` bytes; what is absent, or no plain file, has none: a
        pipe would be waited for. OSError where the file may not be read."""
        if not self.path.is_file():
            self.reading.is_there = False
            return
        with self.path.open("rb") as file:
            size = self._begin(file)
            end = size if most is None else min(size, self._offset + most)
            while self._offset < end and (line := file.readline(LONGEST)):
                if not line.endswith(b"\n") and len(line) < LONGEST:
                    self.unfinished = len(line)
                    break
                start, self._offset = self._offset, self._offset + len(line)
                yield from self._row(start, line)
            self.behind = max(0, size - self._offset)

    def rest(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """What is behind the last line's end, taken for a row: nobody writes any more."""
        if not (self.unfinished or self._too_long):
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            yield from self._row(self._offset, file.read(LONGEST - 1) + b"\n")

    def _begin(self, file: IO[bytes]) -> int:
        """The file's size; it stands at the first byte that was not read."""
        found = os.fstat(file.fileno())
        self.reading.is_there, self.unfinished = True, 0
        if self._file_id < 0 and self._most is not None and found.st_size > self._most:
            file.seek(found.st_size - self._most - 1)
            while not (line := file.readline(LONGEST)).endswith(b"\n") and line:
                pass
            self.skipped = self._offset = file.tell()
        self._file_id = found.st_ino
        file.seek(self._offset)
        return found.st_size

    def _row(self, start: int, line: bytes) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """The row of a line; none of a line that is none, which is counted at its end."""
        if not line.endswith(b"\n"):
            self._too_long = True
            return
        self.reading.lines += 1
        row = None if self._too_long else parsed(line)
        self._too_long = False
        if row is not None:
            yield start, len(line), row
            return
        self.reading.pass_over()


def rows(path: Path, reading: Reading) -> Iterator[dict[str, Any]]:
    """The rows in order, and in `reading` what was found; an absent file has none. DataError where the file may not be read."""
    tail = Tail(path, reading)
    try:
        yield from (row for _, _, row in tail.rows())
        yield from (row for _, _, row in tail.rest())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


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
