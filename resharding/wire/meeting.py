"""How the processes of a mesh meet through a torch.distributed store, each with a text for the others."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from mrl.errors import WeightSyncError
from mrl.resharding.wire.channel import Lost

TCP = "tcp://"
"""Prefix of the address of a store that other machines reach."""
_POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """The place where a process joins a group, and its rank there."""

    store: str
    """torch.distributed store: `tcp://HOST:PORT`, or the path of a FileStore's file."""
    token: str
    """Name of the group; ranks with different tokens never meet."""
    rank: int
    size: int

    def meet(self, deadline_seconds: float, lost: Lost, *, message: str = "") -> Any:
        """Wait for all ranks and return their store.

        Joining cannot be interrupted: no rank starts before all have met, and one that gives up tells the
        others.

        Args:
            message: text of this rank for the others (`published_by`).

        Raises:
            WeightSyncError: at the deadline, naming the missing ranks, or when `lost` returns a reason."""
        deadline = time.monotonic() + deadline_seconds
        store = PrefixStore(self.token, _opened(self.store, datetime.timedelta(seconds=deadline_seconds)))
        store.set(_name(self.rank), message)
        missing = set(range(self.size))
        while missing:
            missing = {rank for rank in missing if not store.check([_name(rank)])}
            reason = None
            if store.check(["given-up"]):
                reason = store.get("given-up").decode()
            elif missing and time.monotonic() > deadline:
                reason = (
                    f"ranks {sorted(missing)} of {self.size} did not join in time (trainers are numbered "
                    "first)"
                )
            elif missing and (gone := lost()):
                reason = f"{gone} before all ranks had joined; missing: ranks {sorted(missing)}"
            if reason is not None:
                store.set("given-up", reason)
                raise WeightSyncError(reason)
            time.sleep(_POLL_SECONDS if missing else 0)
        return store


def _opened(address: str, timeout: datetime.timedelta) -> Any:
    if address.startswith(TCP):
        host, _, port = address.removeprefix(TCP).rpartition(":")
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    store = FileStore(address)
    store.set_timeout(timeout)
    return store


def published_by(store: Any, rank: int) -> str:
    """Return a rank's text for the others."""
    return store.get(_name(rank)).decode()


def _name(rank: int) -> str:
    return f"here-{rank}"
