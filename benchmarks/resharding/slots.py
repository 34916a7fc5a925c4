"""The generation side of a slot, in a process of its own: the weight sync's real receiver over a storage."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.storage import Storage, Windows
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.lease import Lease, renewed
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire import memory


class StorageSlot:
    """One engine rank, called by the trainer rank of its slot (`Child`). Lists have one answer per engine
    rank."""

    def __init__(self, manifest: RankManifest, deadline_seconds: float, device: torch.device) -> None:
        self._storage = Storage(manifest, device)
        self._receiver = Receiver(deadline_seconds=deadline_seconds, device=device)
        self._copied: Lease | None = None

    def addresses(self) -> list[str]:
        return [self._receiver.address]

    def receive(self, session: Session) -> list[dict[str, float]]:
        """Takes one session; the receiver's seconds."""
        return [self._receiver.receive(session, Windows(self._storage))]

    def copy_plainly(self, lease: list[dict[str, Any]]) -> float:
        """Seconds to write every parameter once by straight copies out of leased memory, which stays mapped as a
        receiver's does."""
        self._copied = renewed(self._copied, lease)
        memory.synchronize(self._storage.device)
        started = time.monotonic()
        self._storage.copy_plainly(self._copied.buffers)
        memory.synchronize(self._storage.device)
        return time.monotonic() - started

    def load_handles(self, checkpoint: list[CheckpointTensor], handles: list[dict[str, Any]]) -> None:
        """Loads whole checkpoint tensors, each out of a handle of its own."""
        leased = Lease(handles)
        for tensor, data in zip(checkpoint, leased.buffers, strict=True):
            self._storage.load(tensor.name, data.view(DTYPES[tensor.dtype]).view(tensor.shape))
        memory.synchronize(self._storage.device)
        del data
        leased.close()

    def poison(self) -> list[None]:
        """What is not written from now on shows."""
        self._storage.poison()
        return [None]

    def differences(self, checkpoint: list[CheckpointTensor], version: int) -> list[str | None]:
        """What is not that version's, byte for byte; None when all is."""
        return [self._storage.first_difference(MadeUp(checkpoint, version=version))]

    def release(self) -> None:
        self._receiver.release()

    def close(self) -> None:
        if self._copied is not None:
            self._copied.close()
        self._receiver.close()
