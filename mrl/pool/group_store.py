"""Store of the rollout buffer's judged groups, in memory until they are released."""

from __future__ import annotations

from collections.abc import Iterable

from mrl.errors import RolloutBufferError
from mrl.pool.group_bytes import size_of
from mrl.samples import Group


class GroupStore:
    """Judged groups of the rollout buffer, by group id; ids are never reused."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._num_put = 0

    @property
    def group_ids(self) -> list[int]:
        """Group ids of all stored groups, in insertion order."""
        return list(self._groups)

    @property
    def num_bytes(self) -> int:
        """Approximate memory of all stored groups, in bytes."""
        return sum(map(size_of, self._groups.values()))

    def put(self, group: Group) -> int:
        """Store a group; return its group id."""
        handle = self._num_put
        self._groups[handle] = group
        self._num_put += 1
        return handle

    def get(self, handles: Iterable[int]) -> list[Group]:
        """Return the groups of these ids, in order. Raise RolloutBufferError if an id is not stored."""
        try:
            return [self._groups[handle] for handle in handles]
        except KeyError as error:
            raise RolloutBufferError(f"group {error} is not in the rollout buffer") from error

    def release(self, handles: Iterable[int]) -> None:
        """Remove groups; ignore ids that are not stored."""
        for handle in handles:
            self._groups.pop(handle, None)
