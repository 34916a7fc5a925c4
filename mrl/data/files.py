"""Reading raw rows from jsonl and parquet files. What the columns mean is `shapes`' business."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.errors import DataError

RawRow = tuple[str, dict[str, Any]]
"""(file:line, columns)."""


def read_rows(path: str | Path) -> Iterator[RawRow]:
    """Rows of one file with their place. Lines and parquet rows are counted from 1.

    Raises DataError for a file that is missing, empty, of unknown kind or unreadable, and for a bad line.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file (working directory {Path.cwd()})")
    if path.name.endswith((".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")):
        rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        raise DataError(f"{path}: unknown kind of file; give .jsonl, .jsonl.gz or .parquet")
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{path}: holds no rows")


def from_arrow(path: str | Path) -> bool:
    """True where rows have Arrow's fixed fields, so that a null may stand for a field that is not there."""
    return Path(path).suffix == ".parquet"


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse_line(line, f"{path}:{number}")
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: no JSON: {error}; the line starts with {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row is an object with named columns, this one is a {type(row).__name__}")
    return row


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error
