"""Where the samples of groups lie between their verdicts and their step. The ledger knows only their prompt's index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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

    def metrics(self) -> dict[str, float]:
        """How much is kept, for a step's row."""
        ...
