"""Trainers' parameter memory, lent to a receiver for one weight sync: its slot's, and on CPUs that of all of its node.

Export, map, read, wait for the device, unmap, acknowledge: each once per session on GPUs. Files stay mapped from one
session to the next, else every session would fault in all their pages again; what their owner frees is free all the same.
The owner's side counts leases (its own `ParameterMemory`); this file only describes and opens.
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
    """`files`: (fd, bytes) of this process's shared buffers."""
    own = ProcessId.own()
    owner = {"kind": "file", "pid": own.pid, "start_ticks": own.start_ticks}
    return [
        owner | {"fd": fd, "inode": os.fstat(fd).st_ino, "num_bytes": num_bytes} for fd, num_bytes in files
    ]


def describe_device(buffers: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """CUDA: a fresh export of each buffer's storage, to be opened once."""
    return [describe_storage(buffer.untyped_storage()) | {"num_bytes": buffer.nbytes} for buffer in buffers]


@dataclasses.dataclass(frozen=True, slots=True)
class Lent:
    """What a trainer rank says of its parameter memory, which others of its node read."""

    tensors: Sequence[LeasedTensor]
    files: Sequence[dict[str, Any]]
    """Its buffers, the same in every session; none on a GPU, where each session exports them anew."""


def of_lenders(lent: Sequence[Lent]) -> list[LeasedTensor]:
    """The tensors of all lenders, in buffers that are numbered through."""
    tensors, buffers = [], 0
    for lender in lent:
        tensors += [dataclasses.replace(t, buffer=t.buffer + buffers) for t in lender.tensors]
        buffers += len(lender.files)
    return tensors


class Lease:
    """The reader's side: all buffers of one session, as [bytes] uint8 tensors that may only be read."""

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
            found = os.fstat(fd)
            if found.st_ino != description["inode"]:
                raise WeightSyncError(f"{path} is another file than the one that was leased")
            if not 0 < num_bytes <= found.st_size:
                raise WeightSyncError(f"{path} holds {found.st_size} bytes, its description says {num_bytes}")
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._maps.append(memory)
        # torch has no tensors that cannot be written: a write would end this process.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.buffers.append(torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)))

    @property
    def stays(self) -> bool:
        """Whether it may be read in later sessions too, which describe the same memory."""
        return not self._opened

    def close(self) -> None:
        """Unmaps everything; only then may the lease be acknowledged as over."""
        self.buffers = []
        maps, self._maps = self._maps, []
        for memory in maps:
            unmap(memory, "the reader of a lease")
        opened, self._opened = self._opened, []
        for segment in opened:
            segment.close()

    def flat(self, tensor: LeasedTensor) -> torch.Tensor:
        """[elements] a tensor in the buffers."""
        dtype = DTYPES[tensor.dtype]
        size = tensor.num_elements * dtype.itemsize
        return self.buffers[tensor.buffer][tensor.byte_offset : tensor.byte_offset + size].view(dtype)


def renewed(lease: Lease | None, descriptions: Sequence[dict[str, Any]]) -> Lease:
    """The lease of an earlier session, where it stays and is of the same memory; else that one ends and a new one begins."""
    if lease is not None and lease.stays and lease.descriptions == list(descriptions):
        return lease
    if lease is not None:
        lease.close()
    return Lease(descriptions)
