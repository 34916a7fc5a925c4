"""The trainer's parameter memory, lent to the slot's receiver for one weight sync.

Export, map, read, wait for the device, unmap, acknowledge: each once per session. The owner's side counts
leases (its own `ParameterMemory`); this file only describes and opens.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.cuda_memory import OpenedCudaSegment, describe_storage
from mrl.resharding.wire.processes import ProcessId, opened_file


def describe_files(files: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """`files`: (fd, bytes) of this process's shared buffers."""
    own = ProcessId.own()
    return [
        {"kind": "file", "pid": own.pid, "start_ticks": own.start_ticks, "fd": fd, "num_bytes": num_bytes}
        for fd, num_bytes in files
    ]


def describe_device(buffers: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """CUDA: a fresh export of each buffer's storage, to be opened once."""
    return [describe_storage(buffer.untyped_storage()) | {"num_bytes": buffer.nbytes} for buffer in buffers]


class Lease:
    """The receiver's side: all buffers of one session, as [bytes] uint8 tensors."""

    def __init__(self, descriptions: Sequence[dict[str, Any]]) -> None:
        self.buffers: list[torch.Tensor] = []
        self._maps: list[mmap.mmap] = []
        self._opened: list[OpenedCudaSegment] = []
        for description in descriptions:
            if description["kind"] == "cuda":
                self._opened.append(OpenedCudaSegment(description | {"token": ""}))
                self.buffers.append(self._opened[-1].buffer)
            else:
                self._map(description)

    def _map(self, description: dict[str, Any]) -> None:
        owner = ProcessId(description["pid"], description["start_ticks"])
        num_bytes = description["num_bytes"]
        with opened_file(owner, description["fd"], "leased memory") as (fd, path):
            if not 0 < num_bytes <= os.fstat(fd).st_size:
                raise WeightSyncError(
                    f"{path} holds {os.fstat(fd).st_size} bytes, its description says {num_bytes}"
                )
            # Private and writable for torch's sake: nothing written here could ever reach the owner.
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_PRIVATE)
        self._maps.append(memory)
        self.buffers.append(torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)))

    def close(self) -> None:
        """Unmaps everything; only then may the lease be acknowledged as over."""
        self.buffers = []
        maps, self._maps = self._maps, []
        for memory in maps:
            with contextlib.suppress(BufferError):
                memory.close()
                continue
            gc.collect()  # takes 0.1 s of every weight sync: only where a reference cycle holds a view
            try:
                memory.close()
            except BufferError as error:
                raise WeightSyncError(
                    "a tensor on leased memory is still held; the lease cannot end"
                ) from error
        opened, self._opened = self._opened, []
        for segment in opened:
            segment.close()
