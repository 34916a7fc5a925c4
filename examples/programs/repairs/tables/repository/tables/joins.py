"""Joins of two tables by the values of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tables.table import Table


def join(
    left: Table, right: Table, on: Sequence[str], how: Literal["inner", "left", "outer"] = "inner"
) -> Table:
    """Join two tables by columns that both have.

    Each pair of rows with the same values makes a row, in order of the left table, then of the right one.
    None equals nothing, not even None.

    Args:
        how: "left" keeps left rows without a partner, with None in the right table's columns; "outer" also
            keeps the right rows without one, at the end.
    """
    others = [name for name in right.columns if name not in on]
    if clash := set(others) & set(left.columns):
        raise ValueError(f"both tables have {', '.join(sorted(clash))}")
    partners: dict[tuple[Any, ...], list[int]] = {}
    for number, row in enumerate(right):
        key = tuple(row[name] for name in on)
        if None not in key:
            partners.setdefault(key, []).append(number)
    right_rows = list(right)
    rows: list[tuple[Any, ...]] = []
    for row, cells in zip(left, left.rows, strict=True):
        matches = partners.get(tuple(row[name] for name in on), [])
        rows += [(*cells, *(right_rows[number][name] for name in others)) for number in matches]
        if not matches and how in ("left", "outer"):
            rows.append((*cells, *(None for _ in others)))
    return Table((*left.columns, *others), rows)
