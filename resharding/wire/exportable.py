"""Allocations of device memory that other processes can map.

torch refuses to export its expandable segments by legacy CUDA IPC. So they are off while a buffer for export
is made, and on again afterwards; meanwhile torch's allocator takes no block of an expandable segment either
(CUDACachingAllocator.cpp, get_free_block).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


@contextlib.contextmanager
def exportable_allocations() -> Iterator[None]:
    """Allocate outside expandable segments, then restore the live settings, whoever set them.

    It writes all settings, because torch resets those left out to their defaults. The live settings include
    PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and later changes.
    """
    before = torch._C._accelerator_getAllocatorSettings()
    without = _EXPANDABLE.sub("expandable_segments:False", before)
    if without == before:  # expandable segments are off by default
        yield
        return
    torch._C._accelerator_setAllocatorSettings(without)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
