"""Device memory that two processes on one GPU share through CUDA IPC; same interface as `shared_memory`.

Each export is opened once and closed once: opening a handle again drives its counter negative, and the
owner's memory is never freed. Legacy IPC handles cover neither torch's expandable segments nor vLLM's sleep
allocator, so the buffers are allocated here, outside both.
"""

from __future__ import annotations

import gc
import uuid
from typing import Any

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.exportable import exportable_allocations

_FIELDS = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")


class CudaSegment:
    """A buffer of device memory, on its owner's side."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._token = uuid.uuid4().hex
        with exportable_allocations():
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._description = describe_storage(self.buffer.untyped_storage())  # the only export
        self._unused = holders(self.buffer)

    def export(self) -> dict[str, Any]:
        return self._description | {"token": self._token, "num_bytes": self.buffer.numel()}

    def close(self) -> None:
        """Free the buffer; the receiver must have closed its side first."""
        self.buffer = _dropped(self.buffer, self._unused)
        torch.cuda.ipc_collect()


class OpenedCudaSegment:
    """A buffer of device memory on the peer's side: opened once, closed once."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.token = description["token"]
        device = _device_of(description["device_uuid"])
        values = [bytes.fromhex(v) if isinstance(v, str) else v for v in description["handle"]]
        if len(values) != len(_FIELDS):
            raise WeightSyncError(
                f"a CUDA handle must have {len(_FIELDS)} fields, got {len(values)}; do both processes use "
                "the same torch?"
            )
        values[0] = device.index
        storage = torch.UntypedStorage._new_shared_cuda(*values)
        if storage.nbytes() < description["num_bytes"]:
            raise WeightSyncError(
                f"the opened device memory has {storage.nbytes()} bytes, expected {description['num_bytes']}"
            )
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[
            : description["num_bytes"]
        ]
        self._unused = holders(self.buffer)

    def close(self) -> None:
        """Drop the mapping and wait for the device; acknowledge it only afterwards."""
        device = self.buffer.device
        self.buffer = _dropped(self.buffer, self._unused)
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()


def _dropped(buffer: torch.Tensor, unused: int) -> torch.Tensor:
    """Return an empty replacement for a closed buffer; collect garbage if it has over `unused` holders."""
    if holders(buffer) > unused:
        gc.collect()  # frees reference cycles (an exception's frame); takes 0.1 s
    return torch.empty(0, dtype=torch.uint8)


def describe_storage(storage: torch.UntypedStorage) -> dict[str, Any]:
    """Export a storage once; the description may be opened exactly once."""
    handle = [v.hex() if isinstance(v, bytes) else v for v in storage._share_cuda_()]
    return {"kind": "cuda", "device_uuid": device_uuid(storage.device), "handle": handle}


def device_uuid(device: torch.device) -> str:
    """Return a GPU's UUID, by which two processes see that they share it; "cpu" for any other device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def _device_of(gpu_uuid: str) -> torch.device:
    """Return the device with this UUID: the two processes may number devices differently."""
    for index in range(torch.cuda.device_count()):
        if device_uuid(torch.device("cuda", index)) == gpu_uuid:
            return torch.device("cuda", index)
    raise WeightSyncError(f"GPU {gpu_uuid} of the peer's buffer is not visible to this process")


def holders(tensor: torch.Tensor) -> int:
    """Return the number of references to the tensor's storage, this call's included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
