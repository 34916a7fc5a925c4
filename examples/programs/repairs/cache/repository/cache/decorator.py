"""Cache the results of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from cache.store import Cache

_MISSING = object()


def cached(cache: Cache) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator whose function looks its arguments up first. Exceptions are not cached."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Hashable, **named: Hashable) -> Any:
            key = (function.__module__, function.__qualname__, arguments, tuple(sorted(named.items())))
            value = cache.get(key, _MISSING)
            if value is _MISSING:
                value = function(*arguments, **named)
                cache.set(key, value)
            return value

        return call

    return decorate
