"""What one trainer rank sends through: its receivers' senders, over memory that it shares with them or over a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.wire.mesh_link import MeshLink, TrainerMesh
from mrl.resharding.wire.nixl_mesh import nixl
from mrl.resharding.wire.slot_link import SlotLink


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoints:
    """The senders of one trainer rank, and what they share."""

    receivers: tuple[int, ...]
    """The engine ranks that it feeds: every num_trainers-th, and so its slot's where slots are shared."""
    senders: tuple[WeightSender, ...]
    mesh: TrainerMesh | None
    num_receivers: int
    """All engine ranks."""

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Other processes have taken the places of these engine ranks, by number; every trainer rank is told of all."""
        for receiver, sender in zip(self.receivers, self.senders, strict=True):
            if receiver in addresses:
                sender.redial(addresses[receiver])
        if self.mesh is not None:
            self.mesh.drop()

    def present(self, absent: Collection[int]) -> list[int]:
        """The positions of the receivers that take part in a session without these engine ranks."""
        return [n for n, receiver in enumerate(self.receivers) if receiver not in absent]

    def leave_out(self, absent: Collection[int]) -> None:
        """The mesh of the next session is without these engine ranks."""
        if self.mesh is not None:
            self.mesh.keep([r for r in range(self.num_receivers) if r not in absent])

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        for sender in self.senders:
            sender.close()
        if self.mesh is not None:
            self.mesh.drop()


def open_endpoints(
    sync: SyncSection,
    addresses: Sequence[str],
    *,
    rank: int,
    num_trainers: int,
    device: torch.device,
    store: str | None,
) -> Endpoints:
    """`addresses`: of all engine ranks. `store`: address of the trainers' torch.distributed store, for
    a mesh."""
    receivers = tuple(range(rank, len(addresses), num_trainers))
    if sync.transport == "auto":
        senders = tuple(
            WeightSender(addresses[r], sync, SlotLink(sync.bucket_bytes, device)) for r in receivers
        )
        return Endpoints(receivers, senders, None, len(addresses))
    if store is None:
        raise WeightSyncError(f"sync.transport = {sync.transport} needs the address of the trainers' store")
    if sync.transport == "nixl":
        nixl()
    mesh = TrainerMesh(
        sync.transport,
        store,
        rank=rank,
        num_trainers=num_trainers,
        num_receivers=len(addresses),
        device=device,
        deadline_seconds=sync.deadline_seconds,
        digests=sync.verify != "off",
    )
    senders = tuple(WeightSender(addresses[r], sync, MeshLink(mesh, r, sync.bucket_bytes)) for r in receivers)
    return Endpoints(receivers, senders, mesh, len(addresses))
