"""Where the samples of groups lie between their verdicts and their step. The ledger knows only their prompt's index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mrl.errors import PoolError
from mrl.samples import Group


class Store(Protocol):
    """Keeps groups until they are released. A handle is a number that is never used again."""

    def put(self, group: Group) -> int:
        """Keeps a group; its handle. PoolError where it cannot be kept."""
        ...

    def get(self, handles: Sequence[int]) -> list[Group]:
        """The groups of these handles, in their order. PoolError for one that is not kept."""
        ...

    def release(self, handles: Sequence[int]) -> None:
        """Forgets groups; others that are not kept are no error."""
        ...


class MemoryStore:
    """In this process, without a limit."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._next = 0

    def put(self, group: Group) -> int:
        handle, self._next = self._next, self._next + 1
        self._groups[handle] = group
        return handle

    def get(self, handles: Sequence[int]) -> list[Group]:
        if missing := [handle for handle in handles if handle not in self._groups]:
            raise PoolError(f"the pool does not keep groups {missing}")
        return [self._groups[handle] for handle in handles]

    def release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._groups.pop(handle, None)
