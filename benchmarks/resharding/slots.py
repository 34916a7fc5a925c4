"""The generation side of a slot, in its own process: the weight sync's real receiver over a storage."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.storage import Storage, StorageConsumer
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.lease import Lease, reuse_or_open_lease
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire import memory


class StorageSlot:
    """One engine rank, called by its slot's trainer rank (`Child`); lists have one entry per engine rank."""

    def __init__(self, manifest: RankManifest, deadline_seconds: float, device: torch.device) -> None:
        self._storage = Storage(manifest, device)
        self._receiver = Receiver(deadline_seconds=deadline_seconds, device=device)
        self._copied: Lease | None = None

    def addresses(self) -> list[str]:
        return [self._receiver.address]

    def receive(self, session: Session) -> list[dict[str, float]]:
        """Take one session; return the receiver's seconds."""
        return [self._receiver.receive(session, StorageConsumer(self._storage))]

    def copy_plainly(self, lease: list[dict[str, Any]]) -> float:
        """Copy every parameter once from leased memory, which stays mapped; return seconds."""
        self._copied = reuse_or_open_lease(self._copied, lease)
        memory.synchronize(self._storage.device)
        started = time.monotonic()
        self._storage.copy_plainly(self._copied.buffers)
        memory.synchronize(self._storage.device)
        return time.monotonic() - started

    def load_handles(self, checkpoint: list[CheckpointTensor], handles: list[dict[str, Any]]) -> None:
        """Load whole checkpoint tensors, each from its own handle."""
        leased = Lease(handles)
        for tensor, data in zip(checkpoint, leased.buffers, strict=True):
            self._storage.load(tensor.name, data.view(DTYPES[tensor.dtype]).view(tensor.shape))
        memory.synchronize(self._storage.device)
        del data
        leased.close()

    def poison(self) -> list[None]:
        """Poison the storage: parameters that nothing writes afterwards become visible."""
        self._storage.poison()
        return [None]

    def differences(self, checkpoint: list[CheckpointTensor], version: int) -> list[str | None]:
        """Return the first difference from that version's bytes, or None."""
        return [self._storage.first_difference(MadeUp(checkpoint, version=version))]

    def release(self) -> None:
        self._receiver.release()

    def close(self) -> None:
        if self._copied is not None:
            self._copied.close()
        self._receiver.close()
