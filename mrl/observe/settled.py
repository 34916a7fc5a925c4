"""A driver that has started: what it has made by then stays, and the memory that a step frees is the next one's."""

from __future__ import annotations

import ctypes
import gc
import sys

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
"""glibc's parameters (malloc.h)."""


def settle() -> None:
    """No step pays for looking through what the start made, nor for pages that it had before: glibc gives a freed array of many
    megabytes back to the kernel, which clears each page of the next one (72 MB: 160 ms on a virtual machine whose host has taken the
    pages too, 8 ms of a memory that was kept). A process then keeps what it needed at most."""
    gc.collect()
    gc.freeze()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)
