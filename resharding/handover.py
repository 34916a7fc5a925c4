"""One trainer rank's side of every hand-over of a run: its sender, and the plan made once and replayed.

Consumes: the Megatron worker's description of itself. Produces: sessions sent. Waits for: peers and the slot's receiver, each with
sync.deadline_seconds. Modes: `gather` streams full tensors; `planned` follows the static plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from models.families import Family
from models.manifest import LocalTensor
from mrl.config.sync import SyncSection
from mrl.errors import ReshardError
from resharding import gather, gather_plan, planned
from resharding.gather import SendStats
from resharding.layout import Layout
from resharding.lease import describe_device, describe_files
from resharding.manifest import RankManifest
from resharding.plan import PlanOptions, build_plan
from resharding.sender import WeightSender
from resharding.session import Session
from resharding.sources import from_layout
from resharding.tables import leased_tensors, of_part
from resharding.topology import Topology


class Memory(Protocol):
    """What is read of a Megatron worker's parameter memory."""

    buffers: Sequence[Any]

    def export(self) -> list[tuple[int, int]]: ...

    def lease(self) -> int: ...

    def release(self) -> None: ...


class Trainer(Protocol):
    """What is read of a Megatron worker."""

    family: Family
    hf_config: dict[str, Any]
    layout: Layout
    dtype: torch.dtype
    device: torch.device

    def local_tensors(self) -> Sequence[tuple[LocalTensor, torch.Tensor, int, int]]: ...

    @property
    def memory(self) -> Memory: ...


class GatherHandOver:
    """Sends full checkpoint tensors, one bucket at a time, to the generation rank of this slot."""

    def __init__(self, trainer: Trainer, sync: SyncSection, address: str) -> None:
        self._trainer, self._sync = trainer, sync
        manifests = from_layout(
            trainer.hf_config, trainer.layout, dtype=str(trainer.dtype).removeprefix("torch.")
        )
        self.plan = gather_plan.build(
            trainer.family.checkpoint_tensors(trainer.hf_config),
            [m.tensors for m in manifests],
            sync.bucket_bytes,
        )
        self._sender = WeightSender(address, sync, device=trainer.device)

    @property
    def digest(self) -> str:
        """What a session must carry; equal on all ranks."""
        return self.plan.digest

    def send(self, session: Session) -> dict[str, float]:
        """Sends one session; all trainer ranks call it together. Seconds are this rank's, bytes this slot's."""
        world = dist.group.WORLD if self._trainer.layout.world_size > 1 else None
        stats = gather.send(
            self._sender,
            session,
            self.plan,
            [tensor for _, tensor, _, _ in self._trainer.local_tensors()],
            group=world,
            deadline_seconds=self._sync.deadline_seconds,
        )
        return report(stats)

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        self._sender.close()


class PlannedHandOver:
    """Follows the static plan: nobody gathers; what the slot holds is read by its generation rank from leased memory."""

    def __init__(
        self,
        trainer: Trainer,
        sync: SyncSection,
        address: str,
        destinations: Sequence[RankManifest],
        *,
        slots_per_node: int,
    ) -> None:
        """`destinations`: of every generation rank, in slot order (`RolloutEngine.destination_manifests` of each engine)."""
        self._trainer, self._sync = trainer, sync
        world = trainer.layout.world_size
        if len(destinations) != world:
            raise ReshardError(
                f"{len(destinations)} generation ranks described for {world} slots; each slot has one"
            )
        self._rank = dist.get_rank() if world > 1 else 0
        located = trainer.local_tensors()
        sources = self._sources([tensor for tensor, _, _, _ in located])
        self.plan = build_plan(
            sources,
            [RankManifest.of(rank, d.tensors) for rank, d in enumerate(destinations)],
            Topology.shared(world, slots_per_node=slots_per_node),
            PlanOptions(bucket_bytes=sync.bucket_bytes, interleave_stages=trainer.device.type == "cuda"),
        )
        self._part = self.plan.part(self._rank)
        self._tables = of_part(self._part, leased_tensors(located))
        self._sender = WeightSender(address, sync, device=trainer.device)

    def _sources(self, own: Sequence[LocalTensor]) -> list[RankManifest]:
        """Every rank's manifest from the layout; this rank's must be what it really holds."""
        trainer = self._trainer
        manifests = from_layout(
            trainer.hf_config, trainer.layout, dtype=str(trainer.dtype).removeprefix("torch.")
        )
        if RankManifest.of(self._rank, own).digest != manifests[self._rank].digest:
            raise ReshardError(
                f"trainer rank {self._rank} holds other tensors than its layout {trainer.layout} says"
            )
        return manifests

    @property
    def digest(self) -> str:
        """What a session must carry; equal on all ranks."""
        return self.plan.digest

    def send(self, session: Session) -> dict[str, float]:
        """Sends one session under a lease of the parameter memory; all trainer ranks call it together."""
        trainer = self._trainer
        world = dist.group.WORLD if trainer.layout.world_size > 1 else None
        trainer.memory.lease()
        try:
            stats = planned.send(
                self._sender,
                session,
                self._part,
                self._tables,
                [tensor.detach().reshape(-1) for _, tensor, _, _ in trainer.local_tensors()],
                self._describe(),
                rank_of_slot={slot: slot for slot in range(trainer.layout.world_size)},
                group=world,
                deadline_seconds=self._sync.deadline_seconds,
            )
        finally:
            trainer.memory.release()
        return report(stats) | {"cross_slot_bytes": float(self.received_bytes)}

    @property
    def received_bytes(self) -> int:
        """What reaches this slot from others in one session, messages' alignment included."""
        return planned.received_bytes(self._part)

    def _describe(self) -> list[dict[str, Any]]:
        if self._trainer.device.type == "cuda":
            return describe_device([buffer.param_data for buffer in self._trainer.memory.buffers])
        return describe_files(self._trainer.memory.export())

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        self._sender.close()


def report(stats: SendStats) -> dict[str, float]:
    """A hand-over's figures by metric name: seconds of this rank, bytes of this slot."""
    seconds = {f"{name}_seconds": value for name, value in stats.receiver_seconds.items()}
    return seconds | {
        "bytes": float(stats.num_bytes),
        "gather_seconds": stats.gather_seconds,
        "pack_seconds": stats.pack_seconds,
        "commit_seconds": stats.commit_seconds,
        "sender_wait_seconds": stats.wait_seconds,
    }
