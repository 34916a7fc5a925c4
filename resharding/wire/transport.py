"""How bytes get from a sender to its receiver: one interface, two kinds.

`slot_link`: both share a slot's memory (shared memory on CPU, CUDA IPC on GPUs). `mesh_link`: they share
none, and bytes travel as torch.distributed messages (`mesh`: gloo on CPU, NCCL on GPUs) or are written by NIXL
(`nixl_mesh`). Sessions, digests and commits are the same over both; control messages go through `channel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.mesh_link import KINDS, MeshInbox, MeshLink
from mrl.resharding.wire.slot_link import SlotInbox, SlotLink

Link = SlotLink | MeshLink
"""The sender's end of a connection."""
Inbox = SlotInbox | MeshInbox
"""The receiver's end of a connection."""


def open_inbox(
    descriptions: Sequence[dict[str, Any]], *, device: torch.device, deadline_seconds: float
) -> Inbox:
    """The receiver's end of what a sender described."""
    if descriptions and descriptions[0].get("kind") in KINDS:
        return MeshInbox(descriptions, device=device, deadline_seconds=deadline_seconds)
    if len(descriptions) != 2:
        raise WeightSyncError(f"a slot has two buffers, the sender offers {len(descriptions)}")
    return SlotInbox(descriptions)
