"""Allocations of device memory that other processes can map.

Legacy CUDA IPC does not cover torch's expandable segments (torch refuses to export them), so they are switched
off while a buffer is made that will be exported, and on again afterwards; torch's allocator then takes no block
of an expandable segment either (CUDACachingAllocator.cpp, get_free_block).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


@contextlib.contextmanager
def exportable_allocations() -> Iterator[None]:
    """Allocates outside expandable segments. The live settings come back as they were, whoever made them.

    They are written whole: torch takes what a setting leaves out as its default. PYTORCH_ALLOC_CONF and
    PYTORCH_CUDA_ALLOC_CONF are both in the live settings, and so is what was set since.
    """
    before = torch._C._accelerator_getAllocatorSettings()
    without = _EXPANDABLE.sub("expandable_segments:False", before)
    if without == before:  # expandable segments are off unless they are asked for
        yield
        return
    torch._C._accelerator_setAllocatorSettings(without)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
