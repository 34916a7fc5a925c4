"""Write metrics.jsonl: one object per step, never the same step twice.

Also define which of its fields may differ between equal runs.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mrl.files import put_aside, replacing
from mrl.observe.metric_names import with_current_names

log = logging.getLogger(__name__)

LAYERS = "moe/layers/"
"""Prefix of per-layer metrics, which have a file of their own; the layer's number follows, from 0."""
VOLATILE_PREFIXES = ("time/", "perf/", "mem/", "buffer/", "resume/")
VOLATILE_PARTS = ("seconds", "/held_by/")
"""Fields that depend on speed or crashes; others are equal for equal seed, configuration and machine."""


def without_volatile(row: Mapping[str, object]) -> dict[str, object]:
    """Return the part of a metrics row that a deterministic run repeats bitwise."""
    return {name: value for name, value in row.items() if not _is_volatile(name)}


def _is_volatile(name: str) -> bool:
    return name.startswith(VOLATILE_PREFIXES) or any(part in name for part in VOLATILE_PARTS)


class MetricsLog:
    """Appends rows to a file; rows are complete on disk when `write` returns, unless the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def resume_at(self, step: int) -> None:
        """Drop rows of `step` and later, which a resumed run logs again; put damaged lines aside."""
        damaged: list[bytes] = []
        with replacing(self._path) as kept:
            for line in _lines(self._path):
                if (row := _row(line)) is None:
                    damaged += [line] if line.strip() else []
                elif row["step"] < step:
                    kept.write(line + b"\n")
            if damaged:
                put_aside(self._path, damaged)

    def has(self, step: int) -> bool:
        """Return True if the file has a row of the step."""
        return any(row["step"] == step for row in LoggedRows(self._path))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row; if the disk is full, it is written before the next one."""
        self._unwritten.append(_line({"step": step, **values}))
        if append_lines(self._path, self._unwritten):
            self._unwritten.clear()


def append_lines(path: Path, lines: Sequence[str]) -> bool:
    """Append all lines durably, or none with a warning; return True if they were written."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        log.warning("%s: cannot write %d lines: %s", path, len(lines), error)
        if path.is_file():
            os.truncate(path, size)
        return False
    return True


class LoggedRows:
    """Rows that a file has now, re-read on each iteration; damaged lines and absent files are skipped."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, path.stat().st_size if path.is_file() else 0

    def __iter__(self) -> Iterator[dict[str, float]]:
        read = 0
        for line in _lines(self._path) if self._size else ():
            read += len(line) + 1
            if (row := _row(line)) is not None:
                yield row
            if read >= self._size:
                return


def read(path: Path) -> list[dict[str, float]]:
    """Return all rows of a file."""
    return list(LoggedRows(path))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield lines without their ends; none for an absent file."""
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                yield line.removesuffix(b"\n")


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return dict(with_current_names(row))


def _line(row: Mapping[str, object]) -> str:
    return json.dumps({name: _plain(value) for name, value in row.items()}) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else str(number)
