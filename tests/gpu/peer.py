"""A second process that uses a trainer's memory like an engine's worker, without vLLM and Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.resharding.child import Child
from benchmarks.resharding.storage import Storage, StorageConsumer
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.transfer.lease import Lease, describe_device, describe_files
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire.digest import digest_bytes
from mrl.training.platform.parameter_memory import ParameterMemory

DEADLINE_SECONDS = 60.0


class Peer(Child):
    """The process on the same device."""

    def __init__(self, device: str) -> None:
        super().__init__(_Worker, torch.device(device), seconds=2 * DEADLINE_SECONDS)

    @contextlib.contextmanager
    def leased(self, memory: ParameterMemory, device: torch.device) -> Iterator[list[int]]:
        """Lease the memory to that process; yield the digests that it read."""
        memory.lease()
        buffers = [flat_bytes(buffer.param_data) for buffer in memory.buffers]
        lent = describe_device(buffers) if device.type == "cuda" else describe_files(memory.export())
        yield self.call("lease", lent)
        self.call("unmap")
        memory.release()


class _Worker:
    """State and calls of that process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._receiver = Receiver(deadline_seconds=DEADLINE_SECONDS, device=device)
        self._lease: Lease | None = None

    def address(self) -> str:
        return self._receiver.address

    def receive(self, session: Session, manifest: RankManifest) -> dict[str, int]:
        """Receive one session; return the digest of each tensor."""
        storage = Storage(manifest, self._device)
        self._receiver.receive(session, StorageConsumer(storage))
        return {name: digest_bytes(flat_bytes(flat)) for name, flat in storage.flat.items()}

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def lease(self, lent: list[dict[str, Any]]) -> list[int]:
        self._lease = Lease(lent)
        return [digest_bytes(buffer) for buffer in self._lease.buffers]

    def unmap(self) -> None:
        assert self._lease is not None
        self._lease.close()

    def release(self) -> None:
        self._receiver.release()

    def close(self) -> None:
        self._receiver.close()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as [n] uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
