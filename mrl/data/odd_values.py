"""Handle odd values that writers of JSON, csv and parquet put into rows.

| value | treatment |
|---|---|
| NaN in a column that is read | null: pandas writes missing numbers as NaN |
| half of a surrogate pair | not text: the row is refused |
| a 16-bit or 32-bit float of parquet | its shortest decimal: 3.1, not 3.0999999046325684 |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mrl.errors import DataError

_SHOWN = 60


def without_nan(value: Any) -> Any:
    """Return None for NaN, any other value unchanged."""
    return None if isinstance(value, float) and math.isnan(value) else value


def refuse_lone_surrogates(value: Any, place: str) -> None:
    """Raise DataError if a text in `value`, at any depth, contains half of a surrogate pair.

    Tokenizers and log files cannot encode it; scrapers that cut text at UTF-16 units leave it.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, str) and not item.isascii() and not _is_whole(item):
            raise DataError(
                f"{place}: a text contains half of a surrogate pair, which is not a character: "
                f"{item[:_SHOWN]!a}; remove it from the row"
            )


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def arrow_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow batch or table, narrow floats as their shortest decimals."""
    rows = batch.to_pylist()
    for field in batch.schema:
        if "float" in str(field.type):  # "float" and "halffloat" are narrow, "double" is Python's
            for row in rows:
                row[field.name] = _shortened(row[field.name], field.type)
    return rows


def _shortened(value: Any, kind: Any) -> Any:
    """Replace the narrow floats in a value of an Arrow type by their shortest decimals."""
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
        return [_shortened(item, kind.value_type) for item in value]
    return value
