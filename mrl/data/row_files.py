"""Read raw rows from files and from data sets of the Hugging Face hub; row_shapes.py interprets columns."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mrl.data.hub import DAMAGED_COLUMNS, PREFIX, read_hub
from mrl.data.odd_values import arrow_rows
from mrl.data.row_shapes import names_of
from mrl.errors import DataError

ROW_BYTES = 2**28
"""Maximum bytes of a row; a compressed file of a few megabytes may contain a line of gigabytes."""
LIST_BYTES = 2**30
"""Maximum bytes of a .json file that is one list; it is read whole."""
UNPACKED_BYTES, UNPACKED_TIMES = 2**30, 1100
"""Limits of a parquet column: refused above both, in bytes and times its packed size (gzip reaches 1,032)."""
BATCH_ROWS, BATCH_BYTES = 1024, 2**30
"""Rows of parquet that are unpacked at once, and their maximum bytes."""
ROW_VALUES = 10**6
"""Maximum values per row of a parquet column, on average."""

RawRow = tuple[str, dict[str, Any]]
"""(file:line, columns)."""


def read_rows(path: str | Path) -> Iterator[RawRow]:
    """Yield the rows of a file or hub data set (hf://name:configuration@split) with their place, counted from
    1: lines of text files, rows of anything else.

    Raises DataError if it is missing, empty, unreadable or of unknown kind, and for a bad line.
    """
    empty = True
    for row in read_hub(str(path)) if _is_hub(path) else _read_file(Path(path)):
        empty = False
        yield row
    if empty:
        raise DataError(f"{path}: contains no rows")


def from_arrow(path: str | Path) -> bool:
    """Return True if rows have Arrow's fixed fields, so that a null may mean an absent field."""
    return _is_hub(path) or Path(path).suffix == ".parquet"


def _is_hub(path: str | Path) -> bool:
    return str(path).startswith(PREFIX)


def _read_file(path: Path) -> Iterator[RawRow]:
    if not path.is_file():
        raise DataError(
            f"{path}: no such file (working directory {Path.cwd()}); write a hub data set as hf://name@split"
        )
    for endings, reader in _READERS.items():
        if path.name.endswith(endings):
            return reader(path)
    known = ", ".join(ending for endings in _READERS for ending in endings)
    raise DataError(f"{path}: unknown kind of file; use one of: {known}")


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with _open(path) as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                yield f"{path}:{number}", _parse_line(line, f"{path}:{number}")


def _lines[T: (str, bytes)](file: IO[T], path: Path) -> Iterator[T]:
    """Yield the lines of a file. Raises DataError for one longer than ROW_BYTES."""
    number = 0
    while line := file.readline(ROW_BYTES + 1):
        number += 1
        if len(line) > ROW_BYTES:
            raise DataError(
                f"{path}:{number}: the line is longer than {ROW_BYTES:,} bytes, the maximum for a row"
            )
        yield line


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = _parsed(line)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON: {error}; the line starts with {line[:60]!r}") from error
    return _object(row, place)


def _parsed(data: bytes) -> Any:
    """Parse JSON. Raises ValueError for any other text, and if an object contains a key twice."""
    try:
        return json.loads(data, object_pairs_hook=named_once)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, in linear time. Raises ValueError if it contains a key twice."""
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"an object contains the key {key[:60]!r} twice")
        row[key] = value
    return row


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row must be an object with named columns, not a {type(row).__name__}")
    return row


def _read_json(path: Path) -> Iterator[RawRow]:
    """Yield the rows of one list; a file that does not start as a list is read as one row per line."""
    with _open(path) as file:
        start = file.read(4096).lstrip()[:1]
        if start != b"[":
            yield from _read_jsonl(path)
            return
        file.seek(0)
        data = file.read(LIST_BYTES + 1)
        if len(data) > LIST_BYTES:
            raise DataError(
                f"{path}: the list exceeds {LIST_BYTES:,} bytes; write one row per line instead (.jsonl)"
            )
        try:
            rows = _parsed(data)
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", _object(row, f"{path}:{number}")


def _read_csv(path: Path) -> Iterator[RawRow]:
    """Yield rows by the header's names, all text; an empty cell is null. A place is the row's last line."""
    limit = csv.field_size_limit(ROW_BYTES)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(_lines(file, path), strict=True)
            names = list(reader.fieldnames or ())
            if len(set(names)) < len(names):
                raise DataError(
                    f"{path}: the header contains a column twice: {names_of(dict.fromkeys(names))}"
                )
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{place}: the row must have as many cells as the header ({len(names)})")
                yield place, {name: cell or None for name, cell in row.items()}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as csv: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: Path) -> Iterator[RawRow]:
    """Yield the rows; verify the checksums of pages that have one."""
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _require_bounded(file.metadata, path)
            for batch in file.iter_batches(BATCH_ROWS):
                if batch.nbytes > BATCH_BYTES:
                    raise DataError(
                        f"{path}:{number + 1}: this row and the next {batch.num_rows - 1} unpack to "
                        f"{batch.nbytes:,} bytes; the maximum is {BATCH_BYTES:,}"
                    )
                for row in arrow_rows(batch):
                    number += 1
                    yield f"{path}:{number}", row
    except DataError:
        raise
    except (*DAMAGED_COLUMNS, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {str(error)[:500]}") from error


def _require_bounded(metadata: Any, path: Path) -> None:
    """Raise DataError for a column that unpacks to more than memory can hold."""
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        for column in (group.column(number) for number in range(group.num_columns)):
            name, size = column.path_in_schema[:60], column.total_uncompressed_size
            if size > UNPACKED_BYTES and size > UNPACKED_TIMES * column.total_compressed_size:
                raise DataError(
                    f"{path}: column {name!r} has {column.total_compressed_size:,} bytes that unpack to "
                    f"{size:,}; remove it from the file"
                )
            if column.num_values > ROW_VALUES * max(group.num_rows, 1):
                raise DataError(
                    f"{path}: column {name!r} has {column.num_values:,} values in {group.num_rows:,} rows, "
                    f"more than {ROW_VALUES:,} per row; remove it from the file"
                )


_READERS: dict[tuple[str, ...], Callable[[Path], Iterator[RawRow]]] = {
    (".jsonl", ".jsonl.gz", ".ndjson"): _read_jsonl,
    (".json", ".json.gz"): _read_json,
    (".parquet",): _read_parquet,
    (".csv",): _read_csv,
}
