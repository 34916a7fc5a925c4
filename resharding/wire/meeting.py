"""How the processes of a mesh come together: through a torch.distributed store, each with what it has to say."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from mrl.errors import WeightSyncError
from mrl.resharding.wire.channel import Lost

TCP = "tcp://"
"""How the address of a store begins that other machines reach."""
_POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as what a process joins."""

    store: str
    """Of torch.distributed: `tcp://HOST:PORT`, or the path of a FileStore's file."""
    token: str
    """Names the group; ranks with different tokens never meet."""
    rank: int
    size: int

    def meet(self, deadline_seconds: float, lost: Lost, *, said: str = "") -> Any:
        """The store of those that met, when all ranks are there. Joining what they meet for cannot be
        interrupted, so nobody starts it before; who gives up tells all.

        `said`: what others may read of this rank (`said_by`). WeightSyncError at the deadline, naming who is
        missing, or when `lost` says why."""
        deadline = time.monotonic() + deadline_seconds
        store = PrefixStore(self.token, _opened(self.store, datetime.timedelta(seconds=deadline_seconds)))
        store.set(_name(self.rank), said)
        missing = set(range(self.size))
        while missing:
            missing = {rank for rank in missing if not store.check([_name(rank)])}
            reason = None
            if store.check(["given-up"]):
                reason = store.get("given-up").decode()
            elif missing and time.monotonic() > deadline:
                reason = f"ranks {sorted(missing)} of {self.size} did not come in time (trainers are numbered first)"
            elif missing and (gone := lost()):
                reason = f"{gone} before all had met; ranks {sorted(missing)} had not come"
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


def said_by(store: Any, rank: int) -> str:
    """What a rank said when it came."""
    return store.get(_name(rank)).decode()


def _name(rank: int) -> str:
    return f"here-{rank}"
