"""Trainers' parameter memory, lent to a receiver for one weight sync: its slot's, on CPUs its node's.

On GPUs each session exports, maps, reads, waits for the device, unmaps and acknowledges once. Files stay
mapped between sessions: else every session would fault in all pages again. What their owner frees is freed
all the same. The owner counts leases (`ParameterMemory`); this file only describes and opens memory.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.slot_tables import LeasedTensor
from mrl.resharding.wire.cuda_memory import OpenedCudaSegment, describe_storage
from mrl.resharding.wire.processes import ProcessId, file_of_process
from mrl.resharding.wire.shared_memory import unmap


def describe_files(files: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Describe this process's shared buffers, given as (fd, bytes)."""
    process = ProcessId.own()
    owner = {"kind": "file", "pid": process.pid, "start_ticks": process.start_ticks}
    return [
        owner | {"fd": fd, "inode": os.fstat(fd).st_ino, "num_bytes": num_bytes} for fd, num_bytes in files
    ]


def describe_device(buffers: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Export each CUDA buffer's storage anew; a description may be opened once."""
    return [describe_storage(buffer.untyped_storage()) | {"num_bytes": buffer.nbytes} for buffer in buffers]


@dataclasses.dataclass(frozen=True, slots=True)
class LentMemory:
    """Description of a trainer rank's parameter memory, which others of its node read."""

    tensors: Sequence[LeasedTensor]
    files: Sequence[dict[str, Any]]
    """Buffers, the same in every session; none on a GPU, where each session exports them anew."""


def lenders_tensors(lent: Sequence[LentMemory]) -> list[LeasedTensor]:
    """Return the tensors of all lenders, with their buffers numbered consecutively."""
    tensors, buffers = [], 0
    for lender in lent:
        tensors += [dataclasses.replace(t, buffer=t.buffer + buffers) for t in lender.tensors]
        buffers += len(lender.files)
    return tensors


class Lease:
    """The reader's side: all buffers of one session, as read-only [bytes] uint8 tensors."""

    def __init__(self, descriptions: Sequence[dict[str, Any]]) -> None:
        self.descriptions = list(descriptions)
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
        with file_of_process(owner, description["fd"], "leased memory") as (fd, path):
            status = os.fstat(fd)
            if status.st_ino != description["inode"]:
                raise WeightSyncError(f"{path} is another file than the leased one")
            if not 0 < num_bytes <= status.st_size:
                raise WeightSyncError(
                    f"{path} has {status.st_size} bytes, but its description says {num_bytes}"
                )
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._maps.append(memory)
        # torch has no read-only tensors: a write would end this process.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.buffers.append(torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)))

    @property
    def reusable(self) -> bool:
        """True if later sessions that describe the same memory may also read it."""
        return not self._opened

    def close(self) -> None:
        """Unmap everything; acknowledge the end of the lease only afterwards."""
        self.buffers = []
        maps, self._maps = self._maps, []
        for memory in maps:
            unmap(memory, "the reader of a lease")
        opened, self._opened = self._opened, []
        for segment in opened:
            segment.close()

    def flat(self, tensor: LeasedTensor) -> torch.Tensor:
        """Return a leased tensor as [elements]."""
        dtype = DTYPES[tensor.dtype]
        size = tensor.num_elements * dtype.itemsize
        return self.buffers[tensor.buffer][tensor.byte_offset : tensor.byte_offset + size].view(dtype)


def reuse_or_open_lease(lease: Lease | None, descriptions: Sequence[dict[str, Any]]) -> Lease:
    """Return the earlier lease if it stays and is of the same memory; else close it and open a new one."""
    if lease is not None and lease.reusable and lease.descriptions == list(descriptions):
        return lease
    if lease is not None:
        lease.close()
    return Lease(descriptions)
