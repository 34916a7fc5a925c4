"""Merging of nested settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVE = "__remove__"
"""A value that removes the setting below it."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of another layer over them. Neither layer is changed or shared."""
    result = base if isinstance(base, dict) else dict(base)
    for name, value in over.items():
        if value == REMOVE:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            below = result.get(name)
            result[name] = merged(below if isinstance(below, Mapping) else {}, value)
        else:
            result[name] = value
    return result


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the path "a.b"."""
    for part in reversed(path.split(".")):
        if not part:
            raise ValueError(f"not a path: {path!r}")
        value = {part: value}
    return value


def changes(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by path, with both values; None if one lacks it."""
    result: dict[str, tuple[Any, Any]] = {}
    for name in {**old, **new}:
        place = f"{path}.{name}" if path else name
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            result |= changes(before, after, place)
        elif before != after:
            result[place] = (before, after)
    return result
