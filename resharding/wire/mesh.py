"""One process group of all trainer ranks and all engine ranks of a weight sync, which share no memory.

Ranks: trainers first, then engine ranks. Met through the trainers' own torch.distributed store. Kept while
sessions commit; after a failure every member drops it, because a message of the failed session could still be
under way, and the next session meets under another token. gloo on CPU; NCCL on GPUs, not yet run.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from mrl.errors import WeightSyncError
from mrl.resharding.wire.channel import Lost

_POLL_SECONDS = 0.02


class MessageLost(WeightSyncError):
    """A message did not arrive: the other end is gone, or gave up (its own error then says why)."""


class NotStarted:
    """A message that the group refused because the other end was gone already; the loss is told where it is
    waited for."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: datetime.timedelta) -> None:
        raise self._error


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


class Mesh:
    """The group of all ranks of a weight sync, joined."""

    def __init__(
        self, meeting: Meeting, *, device: torch.device, deadline_seconds: float, lost: Lost
    ) -> None:
        """Returns when all ranks are there; WeightSyncError at the deadline, naming who is missing, or when
        `lost` says so."""
        self._timeout = datetime.timedelta(seconds=deadline_seconds)
        try:
            store = TCPStore(
                meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=self._timeout
            )
            named = PrefixStore(meeting.token, store)
            _meet(named, meeting, time.monotonic() + deadline_seconds, lost)
            self._group = self._join(named, meeting, device)
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(
                f"rank {meeting.rank} of {meeting.size} could not join the others through {meeting.host}:{meeting.port}: "
                f"{error}"
            ) from error

    def _join(self, store: Any, meeting: Meeting, device: torch.device) -> Any:
        if device.type == "cuda":
            return dist.ProcessGroupNCCL(store, meeting.rank, meeting.size, self._timeout)  # type: ignore[attr-defined]
        return dist.ProcessGroupGloo(store, meeting.rank, meeting.size, self._timeout)

    def send(self, data: torch.Tensor, rank: int) -> Any:
        """Starts a message; the data must stay as it is until `wait` has returned for it."""
        return _started(self._group.send, data, rank)

    def receive(self, data: torch.Tensor, rank: int) -> Any:
        return _started(self._group.recv, data, rank)

    def wait(self, works: Sequence[Any], what: str) -> None:
        """Returns when all messages are through; MessageLost otherwise."""
        try:
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise MessageLost(f"{what}: {error}") from error

    def close(self) -> None:
        """Peers that wait for this rank hear of it at once."""
        self._group.abort()
        del self._group


def _started(transfer: Callable[..., Any], data: torch.Tensor, rank: int) -> Any:
    try:
        return transfer([data], rank, 0)
    except RuntimeError as error:
        return NotStarted(error)


def _meet(store: Any, meeting: Meeting, deadline: float, lost: Lost) -> None:
    """Returns when every rank has come. Joining itself cannot be interrupted, so nobody starts it before; who
    gives up tells all."""
    store.set(f"here-{meeting.rank}", "")
    missing = set(range(meeting.size))
    while missing:
        missing = {rank for rank in missing if not store.check([f"here-{rank}"])}
        reason = None
        if store.check(["given-up"]):
            reason = store.get("given-up").decode()
        elif missing and time.monotonic() > deadline:
            reason = f"ranks {sorted(missing)} of {meeting.size} did not come in time (trainers are numbered first)"
        elif missing and (gone := lost()):
            reason = f"{gone} before all had met; ranks {sorted(missing)} had not come"
        if reason is not None:
            store.set("given-up", reason)
            raise WeightSyncError(reason)
        time.sleep(_POLL_SECONDS if missing else 0)
