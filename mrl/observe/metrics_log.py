"""metrics.jsonl: one object a step, always written, never a step twice.

Beside the file: which of its fields may differ between equal runs.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mrl.files import put_aside, replacing
from mrl.observe.metric_names import with_todays_names

log = logging.getLogger(__name__)

LAYERS = "moe/layers/"
"""Prefix of figures of single layers, which have a file of their own; the layer's number follows, from 0."""
VOLATILE_PREFIXES = ("time/", "perf/", "mem/", "pool/", "resume/")
VOLATILE_PARTS = ("seconds", "/held_by/")
"""Fields that depend on the machine's speed or on deaths; all others are equal for equal seed, configuration and machine."""


def without_volatile(row: Mapping[str, object]) -> dict[str, object]:
    """Keeps the part of a metrics row that a deterministic run repeats to the last bit."""
    return {name: value for name, value in row.items() if not _is_volatile(name)}


def _is_volatile(name: str) -> bool:
    return name.startswith(VOLATILE_PREFIXES) or any(part in name for part in VOLATILE_PARTS)


class MetricsLog:
    """Appends rows to a file; rows are complete lines on disk when `write` returns, unless the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def resume_at(self, step: int) -> None:
        """Drops rows of `step` and later, so that a resumed run logs no step twice. Lines that are no rows go to a file beside."""
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
        """Whether a row of the step is there."""
        return any(row["step"] == step for row in LoggedRows(self._path))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a row; one that a full disk does not take is written before the next one."""
        self._unwritten.append(_line({"step": step, **values}))
        if append_lines(self._path, self._unwritten):
            self._unwritten.clear()


def append_lines(path: Path, lines: Sequence[str]) -> bool:
    """Writes all lines durably at the end of the file, or none of them with a warning; says whether it did."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        log.warning("%s: %d lines could not be written: %s", path, len(lines), error)
        if path.is_file():
            os.truncate(path, size)
        return False
    return True


class LoggedRows:
    """The rows that a file has at this moment, each with its step, read one by one and anew each time; an absent file has none. What is no row,
    torn or damaged, is passed over."""

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
    """All rows of a file at once."""
    return list(LoggedRows(path))


def _lines(path: Path) -> Iterator[bytes]:
    """Without their ends; none of an absent file."""
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
    return dict(with_todays_names(row))


def _line(row: Mapping[str, object]) -> str:
    return json.dumps({name: _plain(value) for name, value in row.items()}) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else str(number)
