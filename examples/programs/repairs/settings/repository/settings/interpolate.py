"""References to other settings: "${paths.root}/logs"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_REFERENCE = re.compile(r"\$\{([^}]*)\}")


class InterpolationError(ValueError):
    """A reference has no target, or leads back to itself."""


def find(settings: Mapping[str, Any], path: str) -> Any:
    """Return the value of a path. Raise KeyError if there is none."""
    value: Any = settings
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(path)
        value = value[part]
    return value


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the values of all references."""
    return {name: _resolve(value, settings, ()) for name, value in settings.items()}


def _resolve(value: Any, settings: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {name: _resolve(inner, settings, path) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, settings, path) for inner in value]
    if not isinstance(value, str):
        return value
    if match := _REFERENCE.fullmatch(value):  # the whole value keeps its type
        return _target(match[1], settings, path)
    return _REFERENCE.sub(lambda match: str(_target(match[1], settings, path)), value)


def _target(name: str, settings: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    if name in path:
        raise InterpolationError(" -> ".join([*path, name]))
    try:
        value = find(settings, name)
    except KeyError as error:
        raise InterpolationError(f"there is no {name}") from error
    return _resolve(value, settings, (*path, name))
