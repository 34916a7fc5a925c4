"""Names that a template can use: the innermost loop's first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Scope:
    """Values by name, over those of the enclosing scope."""

    def __init__(self, values: Mapping[str, Any], outer: Scope | None = None) -> None:
        self._values, self._outer = dict(values), outer

    def inner(self, **values: Any) -> Scope:
        """Return a scope for a loop's body."""
        return Scope(values, self)

    def find(self, path: str) -> Any:
        """Return the value of a path such as user.name or rows.0; KeyError if a part is missing."""
        first, *others = path.split(".")
        value = self._first(first)
        for part in others:
            if isinstance(value, Mapping):
                value = value[part]
            elif isinstance(value, list | tuple) and part.isdigit():
                if int(part) >= len(value):
                    raise KeyError(part)
                value = value[int(part)]
            elif not part.startswith("_") and hasattr(value, part):
                value = getattr(value, part)
            else:
                raise KeyError(part)
        return value

    def _first(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        if self._outer is None:
            raise KeyError(name)
        return self._outer._first(name)
