"""Odd values that writers of JSON, csv and parquet put into rows, and what is made of them.

| value | meaning |
|---|---|
| NaN in a column that is read | a null: pandas writes a missing number so |
| half of a surrogate pair | no text: the row is refused |
| a 16-bit or 32-bit float of parquet | the shortest decimal that is the same narrow float: 3.1, not 3.0999999046325684 |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        if "float" in str(
            field.type
        ):  # "float" and "halffloat" are Arrow's narrow ones, "double" is as wide as Python's
            for row in rows:
                row[field.name] = _shortened(row[field.name], field.type)
    return rows


def _shortened(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, the narrow floats in it as their shortest decimals."""
    import pyarrow.types as types

    if value is None:
        return None
    if types.is_float16(kind) or types.is_float32(kind):
        return float(str((np.float16 if types.is_float16(kind) else np.float32)(value)))
    if types.is_struct(kind):
        return {name: _shortened(part, kind.field(name).type) for name, part in value.items()}
    if types.is_map(kind):
        return [(_shortened(a, kind.key_type), _shortened(b, kind.item_type)) for a, b in value]
    if types.is_dictionary(kind):
        return _shortened(value, kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_shortened(each, kind.value_type) for each in value]
    return value
