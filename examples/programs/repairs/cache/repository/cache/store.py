"""The cache: entries in order of their last use, each with a time of its end."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any


@dataclasses.dataclass
class Statistics:
    """Counts of what happened."""

    hits: int = 0
    misses: int = 0
    expired: int = 0
    evicted: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the fraction of lookups that were hits; 0 without any."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


@dataclasses.dataclass
class _Entry:
    value: Any
    ends_at: float


class Cache:
    """At most `size` entries. An entry lives for `seconds` after it is set.

    If the cache is full, expired entries make room first, and then the one that was used least recently.
    """

    def __init__(self, size: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if size < 1 or seconds <= 0:
            raise ValueError("size and seconds must be positive")
        self.size, self.seconds = size, seconds
        self.statistics = Statistics()
        self._clock = clock
        self._entries: collections.OrderedDict[Hashable, _Entry] = collections.OrderedDict()

    def __len__(self) -> int:
        now = self._clock()
        return sum(entry.ends_at > now for entry in self._entries.values())

    def __iter__(self) -> Iterator[Hashable]:
        """Yield the living keys; the one used least recently comes first."""
        now = self._clock()
        return iter([key for key, entry in self._entries.items() if entry.ends_at > now])

    def get(self, key: Hashable, default: Any = None) -> Any:
        """Return the value of a living entry, which counts as a use; else the default."""
        entry = self._entries.get(key)
        if entry is not None and entry.ends_at <= self._clock():
            del self._entries[key]
            self.statistics.expired += 1
            entry = None
        if entry is None:
            self.statistics.misses += 1
            return default
        self._entries.move_to_end(key)
        self.statistics.hits += 1
        return entry.value

    def set(self, key: Hashable, value: Any) -> None:
        """Set an entry. It is then the one used most recently, and lives from now on."""
        now = self._clock()
        if len(self._entries) >= self.size:
            self._make_room(now)
        self._entries[key] = _Entry(value, now + self.seconds)

    def delete(self, key: Hashable) -> bool:
        """Delete an entry; return True if it was there and alive."""
        entry = self._entries.pop(key, None)
        return entry is not None and entry.ends_at > self._clock()

    def clear(self) -> None:
        """Delete all entries, and keep the statistics."""
        self._entries.clear()

    def _make_room(self, now: float) -> None:
        for key in [key for key, entry in self._entries.items() if entry.ends_at <= now]:
            del self._entries[key]
            self.statistics.expired += 1
        while len(self._entries) >= self.size:
            self._entries.popitem(last=False)
            self.statistics.evicted += 1
