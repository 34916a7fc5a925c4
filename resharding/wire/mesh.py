"""One process group of all trainer ranks and all engine ranks of a weight sync, which share no memory.

Trainers are numbered first, then engine ranks. They meet through the trainers' own torch.distributed store.
The group stays while sessions commit. After a failure every member drops it, because a message of the failed
session could still be in flight; the next session meets under another token. gloo on CPU; NCCL on GPUs, not
yet run.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mrl.errors import WeightSyncError
from mrl.resharding.wire.bucket_messages import digest_in, trailer, with_digests, with_trailers
from mrl.resharding.wire.channel import Lost
from mrl.resharding.wire.meeting import Meeting


class MessageLost(WeightSyncError):
    """A message did not arrive: the other end is gone, or gave up (its own error then says why)."""


class FailedWork:
    """A message that the group refused because the other end was gone; `wait` raises the loss."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: datetime.timedelta) -> None:
        raise self._error


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """Bytes to another rank."""

    rank: int
    data: torch.Tensor
    """Flat uint8."""
    packed: torch.Tensor | None = None
    """The same as changes of the version before (`delta.packed_changes`), to be sent instead; flat uint8."""
    bucket: int = 0
    """Receiver's bucket for them; `offset` is where in it they begin."""
    offset: int = 0


class Mesh:
    """Joined group of all ranks of a weight sync."""

    def __init__(
        self,
        meeting: Meeting,
        *,
        device: torch.device,
        deadline_seconds: float,
        lost: Lost,
        buckets: Sequence[torch.Tensor] = (),
    ) -> None:
        """Join all ranks; raise WeightSyncError at the deadline (names missing ranks) or for a `lost` peer.

        `buckets` are ignored: `receive` gets its targets itself."""
        self.lost = lost
        """Return why this rank's peer can never answer. Unused once all have met: then the group notices."""
        self._device, self._timeout = device, datetime.timedelta(seconds=deadline_seconds)
        try:
            store = meeting.meet(deadline_seconds, lost)
            self._group = self._join(store, meeting, device)
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(
                f"rank {meeting.rank} of {meeting.size} could not join the others through {meeting.store}: "
                f"{error}"
            ) from error

    def _join(self, store: Any, meeting: Meeting, device: torch.device) -> Any:
        if device.type != "cuda":
            return dist.ProcessGroupGloo(store, meeting.rank, meeting.size, self._timeout)
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]
        group = nccl(store, meeting.rank, meeting.size, self._timeout)
        index = torch.cuda.current_device() if device.index is None else device.index
        # All ranks make the communicator now, because the batches that use it are of some ranks only.
        group.eager_connect_single_device(torch.device("cuda", index))
        return group

    def send(self, messages: Sequence[Outgoing]) -> list[Any]:
        """Start the messages, each followed by its digest; keep the data unchanged until `wait` returns."""
        return self.start(with_digests((m.rank, m.data) for m in messages), ())

    def send_packed(self, messages: Sequence[Outgoing]) -> list[Any]:
        """Start the messages as they are or packed, each after a header; otherwise like `send`."""
        sends = []
        for m in messages:
            body = m.data if m.packed is None else m.packed
            head = torch.tensor([body.numel(), int(m.packed is not None)])
            sends += [(m.rank, torch.cat([head, trailer(m.data)])), (m.rank, body)]
        return self.start(sends, ())

    def receive_packed(
        self, parcels: Sequence[tuple[int, torch.Tensor]]
    ) -> list[tuple[int, torch.Tensor | None]]:
        """Fill each (rank, data) with that rank's next message, unless it comes packed.

        Returns, by message, the digest of the data, and the packed message or None."""
        heads = [torch.empty(3, dtype=torch.int64) for _ in parcels]
        ranks = [rank for rank, _ in parcels]
        self.wait(self.start((), list(zip(ranks, heads, strict=True))), "the head of a message did not come")
        bodies = []
        for head, (rank, data) in zip(heads, parcels, strict=True):
            size, is_packed, _ = head.tolist()
            if not (size < data.numel() if is_packed else size == data.numel()):
                raise MessageLost(f"rank {rank} sends {size} bytes for a message of {data.numel()}")
            bodies.append(torch.empty(size, dtype=torch.uint8) if is_packed else data)
        self.wait(self.start((), list(zip(ranks, bodies, strict=True))), "bytes of a bucket did not come")
        return [
            (digest_in(head[2:]), body if head[1] else None) for head, body in zip(heads, bodies, strict=True)
        ]

    def flush(self, works: Sequence[Any]) -> None:
        """Do nothing: messages travel without help."""

    def receive(self, parcels: Sequence[tuple[int, torch.Tensor]]) -> list[int]:
        """Fill each (rank, data) with that rank's next message; return the digests that followed them."""
        receives, trailers = with_trailers(parcels, self._device)
        self.wait(self.start((), receives), "bytes of a bucket did not come")
        return [digest_in(value) for value in trailers]

    def start(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Start messages, (rank, data), in one batch; keep the data unchanged until `wait` returns.

        Messages between the same two ranks arrive in their order. NCCL runs a batch as one operation in the
        communicator of all ranks. Alone, each message would make a communicator of its two ranks, with its
        own buffers, and block those after it while it waits: ranks that begin with different peers could wait
        for each other."""
        group: Any = self._group
        operations = [(group.send, *message) for message in sends]
        operations += [(group.recv, *message) for message in receives]
        if not operations or not group.supports_coalescing:
            return [_started(transfer, data, rank) for transfer, rank, data in operations]
        group._start_coalescing()
        for transfer, rank, data in operations:
            transfer([data], rank, 0)
        return [group._end_coalescing()]

    def wait(self, works: Sequence[Any], failure: str) -> None:
        """Wait until all messages are through; raise MessageLost otherwise."""
        try:
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise MessageLost(f"{failure}: {error}") from error

    def close(self) -> None:
        """Leave the group; peers that wait for this rank fail at once."""
        self._group.abort()
        del self._group


def _started(transfer: Callable[..., Any], data: torch.Tensor, rank: int) -> Any:
    try:
        return transfer([data], rank, 0)
    except RuntimeError as error:
        return FailedWork(error)
