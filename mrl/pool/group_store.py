"""The judged groups of a run, in memory until they are released."""

from __future__ import annotations

from collections.abc import Iterable

from mrl.errors import PoolError
from mrl.pool.group_bytes import size_of
from mrl.samples import Group


class GroupStore:
    """Groups by their handles, numbers that are never used again."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._num_put = 0

    @property
    def handles(self) -> list[int]:
        """Of all groups that are kept, in the order in which they came."""
        return list(self._groups)

    @property
    def num_bytes(self) -> int:
        """What the groups take."""
        return sum(map(size_of, self._groups.values()))

    def put(self, group: Group) -> int:
        """Keep a group; return its handle."""
        handle = self._num_put
        self._groups[handle] = group
        self._num_put += 1
        return handle

    def get(self, handles: Iterable[int]) -> list[Group]:
        """Return the groups of these handles, in their order. Raises PoolError for one that is not kept."""
        try:
            return [self._groups[handle] for handle in handles]
        except KeyError as error:
            raise PoolError(f"the pool does not keep group {error}") from error

    def release(self, handles: Iterable[int]) -> None:
        """Forget groups; others that are not kept are no error."""
        for handle in handles:
            self._groups.pop(handle, None)
