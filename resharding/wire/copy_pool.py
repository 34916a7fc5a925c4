"""Ordinary memory used again and again within one session: fresh pages cost several times the copy into them.

A block is free when nobody holds a tensor on it any more, which only the storage's own count can tell:
consumers keep tensors as long as they like. Does nothing on devices, whose allocator caches by itself.
"""

from __future__ import annotations

import torch


class CopyPool:
    """At most `limit` blocks of `block_bytes`; what does not fit is allocated anew."""

    def __init__(self, block_bytes: int, *, device: torch.device, limit: int = 4) -> None:
        self._block_bytes, self._device = block_bytes, device
        self._limit = limit if device.type == "cpu" else 0
        self._blocks: list[torch.Tensor] = []
        self._unused = 0

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """A copy of flat uint8 data; it is the caller's as long as any tensor on it lives."""
        size = data.numel()
        block = self._free() if size <= self._block_bytes else None
        if block is None:
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
        return block[:size].copy_(data)

    def _free(self) -> torch.Tensor | None:
        for block in self._blocks:
            if holders(block) == self._unused:
                return block
        if len(self._blocks) == self._limit:
            return None
        self._blocks.append(torch.empty(self._block_bytes, dtype=torch.uint8, device=self._device))
        self._unused = holders(self._blocks[0]) if len(self._blocks) == 1 else self._unused
        return self._blocks[-1]


def holders(tensor: torch.Tensor) -> int:
    """References to the tensor's storage, this call's own included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
