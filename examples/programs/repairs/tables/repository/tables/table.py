"""A table: columns in order, and rows as tuples."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any


class Table:
    """Rows that all have the same columns. A table never changes."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[Any]] = ()) -> None:
        self.columns = tuple(columns)
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"a column occurs twice: {self.columns}")
        self.rows = [tuple(row) for row in rows]
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"expected {len(self.columns)} cells, found {len(row)}")

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Table:
        """Return a table of mappings; a cell that one lacks is None."""
        listed = list(rows)
        columns = list(dict.fromkeys(name for row in listed for name in row))
        return cls(columns, [[row.get(name) for name in columns] for row in listed])

    @classmethod
    def read_csv(cls, text: str) -> Table:
        """Read comma-separated values with a header; empty cells are None."""
        header, *rows = csv.reader(io.StringIO(text))
        return cls(header, [[cell or None for cell in row] for row in rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def column(self, name: str) -> list[Any]:
        """Return the cells of a column."""
        place = self.place(name)
        return [row[place] for row in self.rows]

    def place(self, name: str) -> int:
        """Return a column's position. Raise KeyError if there is none of this name."""
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; there are {', '.join(self.columns)}")
        return self.columns.index(name)

    def select(self, *names: str) -> Table:
        """Return a table with these columns."""
        places = [self.place(name) for name in names]
        return Table(names, [[row[place] for place in places] for row in self.rows])

    def where(self, condition: Callable[[dict[str, Any]], bool]) -> Table:
        """Return the rows that a condition keeps."""
        kept = [row for row, named in zip(self.rows, self, strict=True) if condition(named)]
        return Table(self.columns, kept)

    def sort(self, *names: str, reverse: bool = False) -> Table:
        """Return the rows in order of these columns. Cells that are None come last in either direction."""
        rows = list(self.rows)
        for name in reversed(names):
            place = self.place(name)
            rows.sort(key=lambda row, place=place: row[place], reverse=reverse)
        return Table(self.columns, rows)

    def group(self, by: str, **totals: tuple[str, Callable[[list[Any]], Any]]) -> Table:
        """Return one row per value of a column, with totals: name=(column, function of its cells)."""
        groups: dict[Any, list[tuple[Any, ...]]] = {}
        place = self.place(by)
        for row in self.rows:
            groups.setdefault(row[place], []).append(row)
        rows = []
        for value, members in groups.items():
            cells = [
                function([row[self.place(name)] for row in members]) for name, function in totals.values()
            ]
            rows.append((value, *cells))
        return Table((by, *totals), rows)
