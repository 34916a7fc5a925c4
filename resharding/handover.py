"""One trainer rank's side of every hand-over of a run: its sender, and the plan made once and replayed.

Consumes: the Megatron worker's description of itself. Produces: sessions sent. Waits for: peers and the slot's receiver, each with
sync.deadline_seconds. Modes: `gather` streams full tensors; `planned` follows the static plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from models.families import Family
from models.manifest import LocalTensor
from mrl.config.sync import SyncSection
from resharding import gather, gather_plan
from resharding.layout import Layout
from resharding.sender import WeightSender
from resharding.session import Session
from resharding.sources import from_layout


class Trainer(Protocol):
    """What is read of a Megatron worker."""

    family: Family
    hf_config: dict[str, Any]
    layout: Layout
    dtype: torch.dtype
    device: torch.device

    def local_tensors(self) -> Sequence[tuple[LocalTensor, torch.Tensor, int, int]]: ...


class GatherHandOver:
    """Sends full checkpoint tensors, one bucket at a time, to the generation rank of this slot."""

    def __init__(self, trainer: Trainer, sync: SyncSection, address: str) -> None:
        self._trainer, self._sync = trainer, sync
        manifests = from_layout(trainer.hf_config, trainer.layout, dtype=str(trainer.dtype).removeprefix("torch."))
        self._plan = gather_plan.build(
            trainer.family.checkpoint_tensors(trainer.hf_config), [m.tensors for m in manifests], sync.bucket_bytes
        )
        self._sender = WeightSender(address, sync, device=trainer.device)

    @property
    def digest(self) -> str:
        """What a session must carry; equal on all ranks."""
        return self._plan.digest

    def send(self, session: Session) -> dict[str, float]:
        """Sends one session; all trainer ranks call it together. Seconds are this rank's, bytes this slot's."""
        world = dist.group.WORLD if self._trainer.layout.world_size > 1 else None
        stats = gather.send(
            self._sender,
            session,
            self._plan,
            [tensor for _, tensor, _, _ in self._trainer.local_tensors()],
            group=world,
            deadline_seconds=self._sync.deadline_seconds,
        )
        seconds = {f"{name}_seconds": value for name, value in stats.receiver_seconds.items()}
        own = dataclasses.asdict(stats)
        return seconds | {
            "bytes": float(own["num_bytes"]),
            "gather_seconds": own["gather_seconds"],
            "sender_wait_seconds": own["wait_seconds"],
        }

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        self._sender.close()
