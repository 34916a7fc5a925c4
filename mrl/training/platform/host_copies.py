"""Copies of device tensors in host memory, for off-loading.

On a GPU the buffers are pinned, allocated once, and copied by a separate stream: at the link's speed and
parallel to other work. On CPU they are plain memory. Memory is registered here, because torch's pinned
allocator rounds large sizes up to the next power of two.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 512
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


class HostCopies:
    """Host copies of tensors of one device, keyed by tensor."""

    def __init__(self, device: torch.device, *, keep: bool) -> None:
        """Keep the buffers after a restore for reuse (`keep`), or free them."""
        self._device, self._keep = device, keep
        self._slabs: list[HostBuffer] = []
        self._places: dict[Tensor, Tensor] = {}
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)

    @property
    def num_bytes(self) -> int:
        """Host memory of the buffers."""
        return sum(slab.buffer.nbytes for slab in self._slabs)

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start copying to the host, after the device's queued work; `wait` before freeing the tensors."""
        self._make_room(tensors)
        if self._stream is None:
            self._copy([(self._places[t], t) for t in tensors])
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy([(self._places[t], t) for t in tensors])

    def wait(self) -> None:
        """Wait for all started copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def move_out(self, tensors: Sequence[Tensor]) -> None:
        """Copy to the host and free the device's memory in place, so that every reference stays valid."""
        self.start(tensors)
        self.wait()
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def move_back(self, tensors: Sequence[Tensor]) -> None:
        """Undo move_out()."""
        for tensor in tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
        self.restore(tensors)

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Copy back; device work queued from now on sees the tensors' saved values."""
        pairs = [(t, self._places[t]) for t in tensors]
        if self._stream is None:
            self._copy(pairs)
        else:
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._copy(pairs)
            current.wait_stream(self._stream)
        if not self._keep:
            self.wait()
            self.free()

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """Return a copied tensor's buffer, with its shape and type."""
        return self._places.get(tensor)

    def free(self) -> None:
        """Free the buffers' memory."""
        self._places.clear()
        for slab in self._slabs:
            slab.free()
        self._slabs.clear()

    @torch.no_grad()
    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    def _make_room(self, tensors: Sequence[Tensor]) -> None:
        """Allocate missing buffers, in one slab. First free all buffers if any has lost its tensor."""
        if self._places.keys() - set(tensors):
            self.wait()
            self.free()
        new = [t for t in tensors if t not in self._places]
        sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in new]
        if not sum(sizes):
            self._places |= {t: torch.empty(t.shape, dtype=t.dtype) for t in new}
            return
        self._slabs.append(slab := HostBuffer(sum(sizes), pinned=self._stream is not None))
        end = 0
        for tensor, size in zip(new, sizes, strict=True):
            place = slab.buffer[end : end + tensor.nbytes]
            self._places[tensor] = place.view(tensor.dtype).view(tensor.shape)
            end += size


class HostBuffer:
    """Host memory in whole pages, registered with the driver if pinned."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        """Raise RuntimeError if the driver refuses to register the memory."""
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer = torch.frombuffer(self._pages, dtype=torch.uint8)
        """[num_bytes] uint8."""
        self._unpin: Any = None
        if pinned:
            address = self.buffer.data_ptr()
            _check(_runtime().cudaHostRegister(address, num_bytes, _PORTABLE), num_bytes)
            # Pages unmapped while registered cannot be registered again at their next mapping.
            self._unpin = weakref.finalize(self, _unregister, address, self._pages)
            self._unpin.atexit = False  # the driver may already be gone

    def free(self) -> None:
        """Free the memory, once nothing refers to it."""
        if self._unpin is not None:
            self._unpin()
        self.buffer = torch.empty(0, dtype=torch.uint8)


def _unregister(address: int, pages: mmap.mmap) -> None:
    _check(_runtime().cudaHostUnregister(address), len(pages))


def _runtime() -> Any:
    return torch.cuda.cudart()


def _check(status: Any, num_bytes: int) -> None:
    if int(status) != 0:
        raise RuntimeError(
            f"the CUDA runtime returned {int(status)} for pinning or unpinning {num_bytes / 1e9:.1f} GB of "
            "host memory for off-loading; check the host's memory and the container's memory limit"
        )
