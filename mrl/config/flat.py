"""Flatten a configuration to one line per setting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of every setting; values that are not text are written as JSON.

    >>> dict(flat({"a": {"b": None, "c": [1, 2]}, "d": "x"}))
    {'a.b': 'null', 'a.c': '[1, 2]', 'd': 'x'}
    """
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)
