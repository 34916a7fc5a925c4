"""Nameless memory that two processes of one machine share: not even kill -9 leaves anything behind.

A segment is an anonymous memfd. The peer opens it through /proc/<pid>/fd/<fd>, after checking that the pid is
still the announced process. The kernel frees the memory with its last mapping and descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import uuid
from typing import Any

import numpy as np
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.processes import ProcessId, file_of_process

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedSegment:
    """A segment on its owner's side: `buffer`, a [size] uint8 tensor. Drop all views of it before `close`."""

    def __init__(self, num_bytes: int, *, sparse: bool = False) -> None:
        """`sparse`: take memory for a page when it is first written, not for all pages at once."""
        self._sparse = sparse
        self._fd = os.memfd_create("mrl-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, num_bytes)
        # A peer can rely on the size of its mapping: nobody can shrink the file under it (SIGBUS).
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._token = uuid.uuid4().hex
        self._map, self.buffer = _map(self._fd, num_bytes, sparse=sparse)

    def export(self) -> dict[str, Any]:
        """Return what the peer needs to open it, as plain values."""
        owner = ProcessId.own()
        return {
            "kind": "memfd",
            "token": self._token,
            "pid": owner.pid,
            "start_ticks": owner.start_ticks,
            "fd": self._fd,
            "num_bytes": self.buffer.numel(),
            "sparse": self._sparse,
        }

    def close(self) -> None:
        """Free the memory; raise an error if this process still has a view of it."""
        if self._fd < 0:
            return
        self.buffer = torch.empty(0, dtype=torch.uint8)
        unmap(self._map, "the owner")
        os.close(self._fd)
        self._fd = -1


class OpenedSegment:
    """A segment on the peer's side, mapped once and used until `close`."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.token = description["token"]
        owner = ProcessId(description["pid"], description["start_ticks"])
        with file_of_process(owner, description["fd"], "shared segment") as (fd, path):
            _check(fd, path, description["num_bytes"])
            self._map, self.buffer = _map(
                fd, description["num_bytes"], sparse=description.get("sparse", False)
            )

    def close(self) -> None:
        """Unmap the segment; acknowledge it only afterwards."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        unmap(self._map, "the receiver")


def _check(fd: int, path: str, num_bytes: int) -> None:
    """Require a sealed memfd of at least the stated size, else a later access could crash."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise WeightSyncError(
            f"{path} is not a shared segment of the weight sync: it is not a memfd"
        ) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WeightSyncError(
            f"{path} is not a shared segment of the weight sync: it is not sealed against shrinking"
        )
    if not 0 < num_bytes <= os.fstat(fd).st_size:
        raise WeightSyncError(
            f"{path} has {os.fstat(fd).st_size} bytes, but its description says {num_bytes}"
        )


def _map(fd: int, num_bytes: int, *, sparse: bool) -> tuple[mmap.mmap, torch.Tensor]:
    memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | (0 if sparse else mmap.MAP_POPULATE))
    # numpy's array keeps the map's buffer: closing under a live tensor raises an error instead of crashing.
    return memory, torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


def unmap(memory: mmap.mmap, who: str) -> None:
    """Close a mapping; raise WeightSyncError if a tensor on it still exists."""
    with contextlib.suppress(BufferError):
        memory.close()
        return
    gc.collect()  # frees views in reference cycles (an exception's frame); takes 0.1 s
    try:
        memory.close()
    except BufferError as error:
        raise WeightSyncError(
            f"{who} still holds a tensor on {len(memory)} bytes of shared memory"
        ) from error
