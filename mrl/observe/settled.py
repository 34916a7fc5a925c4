"""A driver that has started: what it has made by then stays, and the memory that a step frees is the next one's."""

from __future__ import annotations

import ctypes
import gc
import sys

YOUNG, MIDDLE, OLD = 10_000, 10, 100
"""Python's thresholds of garbage collection: objects, then collections of the generation before."""
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
"""glibc's parameters (malloc.h)."""


def settle() -> None:
    """Prepare the process for its steps: garbage collection and memory.

    No step looks through what the start made. A step's samples are some hundred thousand objects, in no cycle,
    that stay for some steps. Python's own thresholds look through them all once or twice a step; these do so
    after ten million objects.

    No step pays for pages that the process had before. glibc gives a freed array of many megabytes back to the
    kernel, which clears each page of the next one (72 MB: 160 ms on a virtual machine whose host has taken the
    pages too, 8 ms of a memory that was kept). The process then keeps what it needed at most.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)
