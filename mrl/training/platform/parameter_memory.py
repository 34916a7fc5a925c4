"""Memory of this rank's parameters: shareable with the slot's engine rank, and off-loadable.

On CPU each buffer is anonymous shared memory, which a peer opens as /proc/<pid>/fd/<fd>. It has no name, so
nothing can be left behind. On CUDA it is ordinary device memory, exported by the device's own means. A lease
means that a peer reads the memory: during one, nothing may move or swap it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mrl.errors import WeightSyncError
from mrl.resharding.wire.exportable import exportable_allocations
from mrl.training.platform.host_copies import HostCopies

_PUNCH_HOLE = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE (linux/falloc.h)."""


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenBuffer:
    """Weights of one type without a Megatron buffer: routers' correction biases and untrained parameters.

    Same interface as Megatron's parameter buffers. They have no gradient and no optimizer, but engines need
    them, and the reference has its own.
    """

    param_data: Tensor
    """[all weights], each starting on a multiple of 64 elements."""
    grad_data: Tensor
    """Empty."""
    param_index_map: dict[Tensor, tuple[int, int, int]]
    """Weight -> (first element, end, 0)."""

    @classmethod
    def of(cls, weights: list[Tensor], *, device: torch.device) -> FrozenBuffer:
        """Move the weights into new memory; they become views of it."""
        places, end = {}, 0
        for weight in weights:
            places[weight] = (end, end + weight.numel(), 0)
            end += -(-weight.numel() // 64) * 64
        data = torch.zeros(end, dtype=weights[0].dtype, device=device)
        for weight, (first, last, _) in places.items():
            view = data[first:last].view(weight.shape)
            view.copy_(weight.data)
            weight.data = view
        return cls(data, torch.empty(0, dtype=torch.float32, device=device), places)


class ParameterMemory:
    """All parameter buffers of one rank, in fixed order: per chunk, dense then expert buffers; last,
    untrained weights, one buffer per type."""

    def __init__(self, models: list[Any], *, device: torch.device) -> None:
        """Call between wrapping the models and making the optimizer, which keeps views."""
        self.buffers: list[Any] = [b for m in models for b in (*m.buffers, *m.expert_parallel_buffers)]
        trained = {parameter for buffer in self.buffers for parameter in buffer.param_index_map}
        frozen: dict[torch.dtype, list[Tensor]] = {}
        for weight in (w for model in models for w in model.module.weights().values() if w not in trained):
            frozen.setdefault(weight.dtype, []).append(weight)
        self.buffers += [FrozenBuffer.of(weights, device=device) for weights in frozen.values()]
        self._device = device
        self._fds: list[int] = []
        self._keeps_copies = device.type != "cpu"
        self._copies = HostCopies(device, keep=self._keeps_copies)
        self._copied = False
        """True if the copies equal the buffers."""
        self._away = False
        self.leases = 0
        self.generation = 0
        """Grows with every reload, which makes earlier exports stale."""
        if device.type == "cpu":
            self._share()

    def _share(self) -> None:
        for buffer in self.buffers:
            fd, size = buffer.param_data.untyped_storage()._share_fd_cpu_()
            assert size >= buffer.param_data.nbytes, f"shared {size} bytes of {buffer.param_data.nbytes}"
            self._fds.append(fd)

    def export(self) -> list[tuple[int, int]]:
        """Return (fd, bytes) of each buffer, for /proc/<pid>/fd/<fd>. Raise WeightSyncError if there is no fd
        or the parameters are off-loaded."""
        self._check_present("export parameter memory")
        if not self._fds:
            raise WeightSyncError(
                "parameter memory has no file descriptor on CUDA; use the device's own export"
            )
        return [(fd, b.param_data.nbytes) for fd, b in zip(self._fds, self.buffers, strict=True)]

    def locate(self, parameter: Tensor) -> tuple[int, int]:
        """Return (buffer index, byte offset) of a parameter."""
        for index, buffer in enumerate(self.buffers):
            if parameter in buffer.param_index_map:
                return index, buffer.param_index_map[parameter][0] * buffer.param_data.element_size()
        raise WeightSyncError(f"a parameter of shape {tuple(parameter.shape)} is not in any parameter buffer")

    def lease(self) -> int:
        """Register a reading peer; return the generation that it reads."""
        self._check_present("lease parameter memory")
        self.leases += 1
        return self.generation

    def release(self) -> None:
        """Unregister a peer that has stopped reading and unmapped."""
        if self.leases == 0:
            raise WeightSyncError("parameter memory was released more often than it was leased")
        self.leases -= 1

    def require_idle(self, action: str) -> None:
        """Raise WeightSyncError while a peer reads, or while the parameters are off-loaded."""
        self._check_present(action)
        self.require_unleased(action)

    def require_unleased(self, action: str) -> None:
        """Raise WeightSyncError while a peer reads."""
        if self.leases:
            raise WeightSyncError(f"cannot {action}: {self.leases} active lease(s) on the parameter memory")

    @property
    def offloaded(self) -> bool:
        return self._away

    def note_change(self) -> None:
        """Record that the buffers change, so the host copy is stale."""
        self._copied = False

    def free_gradients(self) -> None:
        """Free the gradients' memory; reload() allocates it again."""
        for buffer in self.buffers:
            buffer.grad_data.untyped_storage().resize_(0)

    def start_copy(self) -> None:
        """Start offload()'s copy during a weight sync; only if the host buffers are kept anyway."""
        if self._keeps_copies and not self.offloaded:
            self._copy()

    def offload(self) -> None:
        """Copy parameters to the host; free them and the gradients. Raise WeightSyncError while leased."""
        self.require_unleased("off-load parameters")
        self.free_gradients()
        if self.offloaded:
            return
        self._copy()
        self._copies.wait()
        self._away = True
        for index, buffer in enumerate(self.buffers):
            if self._fds:
                _free_pages(self._fds[index])
            else:
                buffer.param_data.untyped_storage().resize_(0)

    def reload(self) -> None:
        """Allocate zeroed gradients and restore off-loaded parameters, to the byte."""
        for buffer in self.buffers:
            if buffer.grad_data.untyped_storage().size() == 0:
                buffer.grad_data.untyped_storage().resize_(buffer.grad_data.nbytes)
                buffer.grad_data.zero_()
        if not self.offloaded:
            return
        if not self._fds:
            with exportable_allocations():
                for buffer in self.buffers:
                    buffer.param_data.untyped_storage().resize_(buffer.param_data.nbytes)
        self._restore()
        self._away = False
        self.generation += 1

    @contextlib.contextmanager
    def preserved(self, action: str) -> Iterator[None]:
        """Let the block overwrite the buffers, and restore them after. Raise WeightSyncError while leased."""
        self.require_idle(action)
        self._copy()
        self._copies.wait()
        try:
            yield
        finally:
            self._restore()

    @contextlib.contextmanager
    def swapped_in(self, snapshot: HostCopies, action: str) -> Iterator[None]:
        """Put a snapshot() into the buffers for the block. Raise WeightSyncError while leased."""
        with self.preserved(action):
            snapshot.restore(self._parameters)
            yield

    def snapshot(self) -> HostCopies:
        """Return a permanent host copy of every buffer, for holding()."""
        self._check_present("copy parameters")
        copies = HostCopies(self._device, keep=True)
        copies.start(self._parameters)
        copies.wait()
        return copies

    @property
    def _parameters(self) -> list[Tensor]:
        return [buffer.param_data for buffer in self.buffers]

    def _copy(self) -> None:
        """Start a host copy, unless the existing one is current."""
        if not self._copied:
            self._copies.start(self._parameters)
            self._copied = True

    def _restore(self) -> None:
        self._copies.restore(self._parameters)
        self._copied = self._keeps_copies

    def shared_bytes(self) -> int:
        """Return the bytes of memory that the shared buffers occupy."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._fds)

    def _check_present(self, action: str) -> None:
        if self.offloaded:
            raise WeightSyncError(f"cannot {action}: parameters are off-loaded; call reload() first")


def _free_pages(fd: int) -> None:
    """Free a shared file's memory, but keep its size and every mapping of it (which read zeros)."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = os.sysconf("SC_PAGE_SIZE")
    size = -(-os.fstat(fd).st_size // page) * page  # a page partly in the range would be kept
    if libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        raise WeightSyncError(f"freeing {size} bytes of shared parameter memory failed: {os.strerror(code)}")
