"""All layers of a program's settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from settings.interpolate import find, resolved
from settings.merge import changes, merged, nested


class Settings:
    """Layers, of which later ones win."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults
        self._layers: list[Mapping[str, Any]] = []

    def add_json(self, text: str) -> None:
        """Add a file's layer."""
        layer = json.loads(text)
        if not isinstance(layer, dict):
            raise ValueError("a layer must be an object")
        self._layers.append(layer)

    def add_environment(self, variables: Mapping[str, str], prefix: str) -> None:
        """Add the variables PREFIX_SECTION__NAME; values are JSON if they can be, else text."""
        for name, text in sorted(variables.items()):
            if name.startswith(f"{prefix}_"):
                path = name.removeprefix(f"{prefix}_").lower().replace("__", ".")
                self._layers.append(nested(path, _value(text)))

    def add_words(self, words: Iterable[str]) -> None:
        """Add words of the form section.name=value."""
        for word in words:
            path, sign, text = word.partition("=")
            if not sign:
                raise ValueError(f"expected name=value, found {word!r}")
            self._layers.append(nested(path.strip(), _value(text.strip())))

    def all(self) -> dict[str, Any]:
        """Return the settings of all layers, with references resolved."""
        result: Mapping[str, Any] = dict(self._defaults)
        for layer in self._layers:
            result = merged(result, layer)
        return resolved(result)

    def get(self, path: str) -> Any:
        """Return one setting. Raise KeyError if there is none."""
        return find(self.all(), path)

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Return what differs from the defaults, by path: the default and the value."""
        return changes(resolved(self._defaults), self.all())


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
