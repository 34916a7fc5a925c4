"""Odd values that writers of JSON, csv and parquet put into rows, and what is made of them.

| value | meaning |
|---|---|
| NaN in a column that is read | a null: pandas writes a missing number so |
| half of a surrogate pair | no text: the row is refused |
| a 16-bit or 32-bit float of parquet | the shortest decimal that is the same narrow float: 3.1, not 3.0999999046325684 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mrl.errors import DataError

_SHOWN = 60


def without_nan(value: Any) -> Any:
    """None for NaN; any other value as it is."""
    return None if isinstance(value, float) and math.isnan(value) else value


def refuse_half_characters(value: Any, place: str) -> None:
    """Raise DataError if a text in `value`, at any depth, contains half of a surrogate pair.

    No tokenizer takes such a text and no log can be written with it; scrapers that cut text at UTF-16 units leave them.
    """
    left = [value]
    while left:
        inner = left.pop()
        if isinstance(inner, Mapping):
            left += [*inner.keys(), *inner.values()]
        elif isinstance(inner, list | tuple):
            left += inner
        elif isinstance(inner, str) and not inner.isascii() and not _is_whole(inner):
            raise DataError(
                f"{place}: a text has half of a surrogate pair, which is no character: {inner[:_SHOWN]!a}; "
                "write the row without it"
            )


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def arrow_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow batch or table, narrow floats as the decimals that were meant."""
    rows = batch.to_pylist()
    for field in batch.schema:
        if (shorten := _shortener(field.type)) is not None:
            for row in rows:
                row[field.name] = shorten(row[field.name])
    return rows


def _shortener(kind: Any) -> Callable[[Any], Any] | None:
    """What shortens the narrow floats in a value of an Arrow type; None if the type has none."""
    import pyarrow.types as types

    if types.is_float16(kind) or types.is_float32(kind):
        narrow = np.float16 if types.is_float16(kind) else np.float32
        return lambda value: None if value is None else float(str(narrow(value)))
    if types.is_struct(kind):
        return _of_fields({kind.field(n).name: kind.field(n).type for n in range(kind.num_fields)})
    if types.is_map(kind):
        return _of_pairs(_shortener(kind.key_type), _shortener(kind.item_type))
    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        inner = _shortener(kind.value_type)
        return inner if inner is None or types.is_dictionary(kind) else _of_elements(inner)
    if types.is_fixed_size_list(kind):
        return _of_elements(_shortener(kind.value_type))
    return None


def _of_elements(inner: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return inner and (lambda values: None if values is None else [inner(value) for value in values])


def _of_pairs(
    left: Callable[[Any], Any] | None, right: Callable[[Any], Any] | None
) -> Callable[[Any], Any] | None:
    if left is None and right is None:
        return None

    def shorten(pairs: Any) -> Any:
        if pairs is None:
            return None
        return [(left(a) if left else a, right(b) if right else b) for a, b in pairs]

    return shorten


def _of_fields(types: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    inner = {name: found for name, kind in types.items() if (found := _shortener(kind)) is not None}
    if not inner:
        return None

    def shorten(value: Any) -> Any:
        if value is None:
            return None
        return {name: inner[name](part) if name in inner else part for name, part in value.items()}

    return shorten
