"""How bytes get from a sender to its receiver: one interface, two kinds.

`slot_link`: both share a slot's memory (shared memory on CPU, CUDA IPC on GPUs). `mesh_link`: they share
none, and bytes travel as torch.distributed messages (`mesh`: gloo on CPU, NCCL on GPUs) or are written by NIXL
(`nixl_mesh`). Sessions, digests and commits are the same over both; control messages go through `channel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.channel import Lost
from mrl.resharding.wire.faults import Faults
from mrl.resharding.wire.mesh_link import KINDS, MeshInbox
from mrl.resharding.wire.messages import Parcel
from mrl.resharding.wire.slot_link import SlotInbox


class Link(Protocol):
    """The sender's end of a connection."""

    device: torch.device

    def describe(self, session_id: str) -> list[dict[str, Any]]:
        """What the receiver needs to open its end; plain values."""
        ...

    def connect(self, lost: Lost) -> None:
        """Meets the other ends, after every receiver was told; returns at once where nothing is to be met."""
        ...

    def drop(self) -> None:
        """The session failed: nothing half-way may reach the next one."""
        ...

    def close(self) -> None: ...


class Inbox(Protocol):
    """The receiver's end of a connection."""

    num_bytes: int
    """The size of a bucket."""

    def is_for(self, descriptions: Sequence[dict[str, Any]]) -> bool:
        """The sender still offers what this was opened for."""
        ...

    def connect(self, lost: Lost) -> None: ...

    def take(self, which: int, num_bytes: int, parcels: Sequence[Parcel] | None = None) -> torch.Tensor:
        """The bucket's first `num_bytes`, filled, until its next `take`: by the sender, or parcel by parcel
        by others."""
        ...

    def drop(self) -> None: ...

    def close(self) -> None: ...


def open_inbox(
    descriptions: Sequence[dict[str, Any]], faults: Faults, *, device: torch.device, deadline_seconds: float
) -> Inbox:
    """The receiver's end of what a sender described."""
    if descriptions and descriptions[0].get("kind") in KINDS:
        return MeshInbox(descriptions, faults, device=device, deadline_seconds=deadline_seconds)
    if len(descriptions) != 2:
        raise WeightSyncError(f"a slot has two buffers, the sender offers {len(descriptions)}")
    return SlotInbox(descriptions, faults)
