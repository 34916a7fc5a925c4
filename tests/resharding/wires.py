"""All transports behind one interface, so that one suite of tests covers them.

CUDA IPC is missing: most of these tests use threads of one process, and CUDA requires two (see tests/gpu).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
import torch.distributed as dist

from mrl.config.sections.sync import SyncSection
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.wire.mesh_link import MeshLink, TrainerMesh
from mrl.resharding.wire.slot_link import SlotLink
from tests.forking import process_kind

End = process_kind("tests.resharding.exchanges", "tests.resharding.faults")
"""A process at one end of a wire, without a trainer rank's half minute of imports."""
MESHES = ("distributed", "nixl")
KINDS = ("shared_memory", *MESHES)


@dataclasses.dataclass(frozen=True)
class Wire:
    """One transport; picklable, so that either end may be in another process."""

    kind: str
    port: int = 0
    """Port of the store at which the ends of a mesh meet."""
    device: ClassVar[torch.device] = torch.device("cpu")

    def receiver(self, seconds: float) -> Receiver:
        host = "127.0.0.1" if self.kind in MESHES else None
        return Receiver(deadline_seconds=seconds, device=self.device, host=host)

    def sender(self, address: str, sync: SyncSection) -> WeightSender:
        if self.kind not in MESHES:
            return WeightSender(address, sync, SlotLink(sync.bucket_bytes, self.device))
        mesh = TrainerMesh(
            self.kind,
            f"tcp://127.0.0.1:{self.port}",
            rank=0,
            num_trainers=1,
            num_receivers=1,
            device=self.device,
            deadline_seconds=sync.deadline_seconds,
        )
        return WeightSender(address, sync, MeshLink(mesh, 0, sync.bucket_bytes))


def store() -> dist.TCPStore:
    """Return the store of a mesh; it lives as long as the object."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
