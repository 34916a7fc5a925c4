"""Copies of device tensors in the host's memory, for off-loading.

On a GPU the buffers are pinned, made once, and filled and read by a stream of their own, so that a copy runs at
the link's speed and beside other work; without one they are plain memory. Registered memory is taken instead of
torch's own pinned allocator, because that rounds large sizes up to the next power of two.
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
    """A host copy of each of some tensors of one device, told apart by the tensors themselves."""

    def __init__(self, device: torch.device, *, keep: bool) -> None:
        """`keep`: the buffers stay after a restore, to be filled again; else their memory is given back."""
        self._device, self._keep = device, keep
        self._slabs: list[Slab] = []
        self._places: dict[Tensor, Tensor] = {}
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)

    @property
    def num_bytes(self) -> int:
        """The host memory that the buffers take."""
        return sum(slab.buffer.nbytes for slab in self._slabs)

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Starts copying to the host what the device has queued so far; `wait` before the tensors are freed."""
        self._make_room(tensors)
        if self._stream is None:
            self._copy([(self._places[t], t) for t in tensors])
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy([(self._places[t], t) for t in tensors])

    def wait(self) -> None:
        """Returns when everything that was started has arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def move_out(self, tensors: Sequence[Tensor]) -> None:
        """Copies to the host and gives the device's memory back, in place, so that every reference stays valid."""
        self.start(tensors)
        self.wait()
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)

    def move_back(self, tensors: Sequence[Tensor]) -> None:
        """Undoes move_out()."""
        for tensor in tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
        self.restore(tensors)

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Copies back; whatever is queued on the device from now on sees the tensors' old values."""
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
        """The buffer of a tensor that was copied, with its shape and type."""
        return self._places.get(tensor)

    def free(self) -> None:
        """Gives the buffers' memory back to the host."""
        self._places.clear()
        for slab in self._slabs:
            slab.free()
        self._slabs.clear()

    @torch.no_grad()
    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    def _make_room(self, tensors: Sequence[Tensor]) -> None:
        """A buffer for each tensor; one slab for all that have none. Buffers of tensors that are gone go too."""
        if self._places.keys() - set(tensors):
            self.wait()
            self.free()
        new = [t for t in tensors if t not in self._places]
        sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in new]
        if not sum(sizes):
            self._places |= {t: torch.empty(t.shape, dtype=t.dtype) for t in new}
            return
        self._slabs.append(slab := Slab(sum(sizes), pinned=self._stream is not None))
        end = 0
        for tensor, size in zip(new, sizes, strict=True):
            own = slab.buffer[end : end + tensor.nbytes]
            self._places[tensor] = own.view(tensor.dtype).view(tensor.shape)
            end += size


class Slab:
    """A piece of the host's memory in whole pages; pinned, it is registered with the driver."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        """RuntimeError where the driver refuses to register the memory."""
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer = torch.frombuffer(self._pages, dtype=torch.uint8)
        """[num_bytes] uint8."""
        self._unpin: Any = None
        if pinned:
            address = self.buffer.data_ptr()
            _check(_runtime().cudaHostRegister(address, num_bytes, _PORTABLE), num_bytes)
            # Pages that are unmapped while they are registered cannot be registered again where they are mapped next.
            self._unpin = weakref.finalize(self, _unregister, address, self._pages)
            self._unpin.atexit = False  # the driver may be gone before

    def free(self) -> None:
        """Gives the memory back, once nothing refers to it any more."""
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
            f"the CUDA runtime answered {int(status)} to pinning or unpinning {num_bytes / 1e9:.1f} GB of host memory "
            "for off-loading; is the host's memory, or the container's limit of it, too small?"
        )
