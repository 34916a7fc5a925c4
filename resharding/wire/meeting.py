"""How the processes of a mesh come together: through a torch.distributed store, each with what it has to say."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from mrl.errors import WeightSyncError
from mrl.resharding.wire.channel import Lost

_POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as what a process joins."""

    host: str
    port: int
    """Of a torch.distributed TCPStore."""
    token: str
    """Names the group; ranks with different tokens never meet."""
    rank: int
    size: int

    def meet(self, deadline_seconds: float, lost: Lost, *, said: str = "") -> Any:
        """The store of those that met, when all ranks are there. Joining what they meet for cannot be
        interrupted, so nobody starts it before; who gives up tells all.

        `said`: what others may read of this rank (`said_by`). WeightSyncError at the deadline, naming who is
        missing, or when `lost` says why."""
        timeout, deadline = datetime.timedelta(seconds=deadline_seconds), time.monotonic() + deadline_seconds
        whole = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = PrefixStore(self.token, whole)
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


def said_by(store: Any, rank: int) -> str:
    """What a rank said when it came."""
    return store.get(_name(rank)).decode()


def _name(rank: int) -> str:
    return f"here-{rank}"
