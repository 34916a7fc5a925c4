"""Two buffers in memory that a slot's two processes share: no bytes move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire import memory
from mrl.resharding.wire.bucket_messages import require_digest, split
from mrl.resharding.wire.channel import Lost
from mrl.resharding.wire.messages import BucketMessage


class SlotLink:
    """The sender's end of a slot's memory; it owns the memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self.segments = [memory.allocate(num_bytes, device) for _ in range(2)]

    def describe(self, session_id: str) -> list[dict[str, Any]]:
        """Return what the receiver needs to open its end, as plain values."""
        return [segment.export() for segment in self.segments]

    def connect(self, lost: Lost) -> None:
        """Do nothing: the receiver opens the memory when the session is announced."""

    def buffer(self, which: int) -> torch.Tensor:
        """Return a buffer, [bucket_bytes] uint8, that the receiver has mapped."""
        return self.segments[which].buffer

    def drop(self) -> None:
        """Do nothing: the memory stays, and the next session overwrites it."""

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


class SlotInbox:
    """The receiver's end of a slot's memory: mapped once and kept across sessions."""

    def __init__(self, descriptions: Sequence[dict[str, Any]]) -> None:
        self._opened: list[memory.OpenedMemory] = []
        try:
            for description in descriptions:
                self._opened.append(memory.open_segment(description))
        except BaseException:
            self.close()
            raise
        self.num_bytes = min(o.buffer.numel() for o in self._opened)

    def is_for(self, descriptions: Sequence[dict[str, Any]]) -> bool:
        """Return True if the sender still offers the memory that is open here."""
        return [o.token for o in self._opened] == [d.get("token") for d in descriptions]

    def connect(self, lost: Lost) -> None:
        """Do nothing: the memory is open."""

    def share(self, session_id: str) -> list[dict[str, Any]]:
        """Describe nothing: other engine ranks read the trainers' memory instead."""
        return []

    @property
    def packs(self) -> bool:
        """False: in shared memory, changes would save nothing."""
        return False

    def take(
        self,
        window: int,
        num_bytes: int,
        parcels: Sequence[BucketMessage] | None = None,
        held: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the first `num_bytes` of a window's bucket, filled by the sender; valid until a window takes
        the bucket again. `held` is ignored."""
        bucket = self._opened[window % 2].buffer[:num_bytes]
        if parcels is None:
            return bucket
        for parcel, (rank, data) in zip(parcels, split(bucket, parcels), strict=True):
            if parcel.digest is None:
                raise WeightSyncError(f"{parcel} has no digest, but it reached the memory of a slot already")
            require_digest(data, parcel.digest, rank)
        return bucket

    def keep(self, window: int, received: torch.Tensor) -> None:
        """Refuse: loading from shared memory takes as long as keeping it elsewhere first."""
        raise WeightSyncError("a session through shared memory cannot be received while the engine serves")

    def kept(self, window: int, num_bytes: int) -> torch.Tensor:
        raise WeightSyncError("shared memory keeps no windows")

    def drop(self) -> None:
        """Do nothing: the mapping stays."""

    def close(self) -> None:
        opened, self._opened = self._opened, []
        for segment in opened:
            segment.close()
