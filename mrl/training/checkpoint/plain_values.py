"""Plain values as bytes and back: JSON, followed by arrays and byte strings. Reading them runs no code.

    length of the JSON (8 bytes, little-endian) | JSON | arrays and byte strings, one after the other

An object of the JSON has one key, the kind of value that it stands for: {"dict": [[key, value], ...]}, {"tuple": [value, ...]},
{"bytes": [start, size]}, {"array": [type, shape, start, size]}.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_LENGTH_BYTES = 8
_KINDS = "biufc"
"""The kinds of numpy's types that are numbers."""


def dumps(value: Any) -> bytes:
    """Return the bytes of a tree of None, booleans, numbers, texts, bytes, arrays of numbers, lists, tuples and dicts.

    TypeError names a value of another type.
    """
    parts: list[bytes] = []
    head = json.dumps(_plain(value, parts, [0])).encode()
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *parts])


def loads(data: bytes) -> Any:
    """Return the value of `dumps`' bytes; ValueError for other bytes."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        return _value(json.loads(data[_LENGTH_BYTES:start]), memoryview(data)[start:])
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"these are no plain values: {error}") from error


def _plain(value: Any, parts: list[bytes], end: list[int]) -> Any:
    """The JSON of a value; its bytes are added to `parts`, whose length so far is `end`."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"dict": [[_plain(k, parts, end), _plain(v, parts, end)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        members = [_plain(member, parts, end) for member in value]
        return members if isinstance(value, list) else {"tuple": members}
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return {"array": [value.dtype.str, list(value.shape), *_appended(value.tobytes(), parts, end)]}
    if isinstance(value, bytes):
        return {"bytes": _appended(value, parts, end)}
    raise TypeError(f"a checkpoint has no place for a value of type {type(value).__name__}: {value!r:.80}")


def _appended(data: bytes, parts: list[bytes], end: list[int]) -> list[int]:
    """[start, size] of the data among the parts."""
    parts.append(data)
    end[0] += len(data)
    return [end[0] - len(data), len(data)]


def _value(plain: Any, data: memoryview) -> Any:
    if isinstance(plain, list):
        return [_value(member, data) for member in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "dict":
        return {_value(key, data): _value(member, data) for key, member in content}
    if kind == "tuple":
        return tuple(_value(member, data) for member in content)
    if kind == "bytes":
        return bytes(_slice(data, *content))
    if kind == "array":
        name, shape, *place = content
        dtype = np.dtype(name)
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of {name}")
        return np.frombuffer(_slice(data, *place), dtype).reshape(shape).copy()
    raise ValueError(f"{kind!r} is not a kind of value")


def _slice(data: memoryview, start: int, size: int) -> memoryview:
    if not 0 <= start <= start + size <= len(data):
        raise ValueError(f"bytes {start} to {start + size} of {len(data)}")
    return data[start : start + size]
