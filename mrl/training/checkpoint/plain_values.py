"""Serialise plain values with msgpack, and number arrays as numpy files. Reading runs no code."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np

_ARRAY = 1
"""msgpack extension code of an array."""


def dumps(value: Any) -> bytes:
    """Return the bytes of a tree of None, booleans, numbers, texts, bytes, number arrays, lists and dicts. A
    tuple comes back as a list. Raise TypeError for other types."""
    return msgspec.msgpack.encode(value, enc_hook=_encoded)


def loads(data: bytes) -> Any:
    """Return the value of `dumps`' bytes; raise ValueError for other bytes."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decoded)
    except (TypeError, ValueError, EOFError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"these are not plain values: {error}") from error


def _encoded(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return msgspec.msgpack.Ext(_ARRAY, file.getvalue())
    raise TypeError(f"a checkpoint cannot contain a value of type {type(value).__name__}: {value!r:.80}")


def _decoded(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension code {code}")
    return np.load(io.BytesIO(data), allow_pickle=False)
