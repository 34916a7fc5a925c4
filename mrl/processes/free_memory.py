"""Return memory that a process no longer uses to the machine, for the processes that share it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def release_free_memory() -> None:
    """Return what glibc keeps for later allocations, of all threads; other allocators do as they do.

    A process that computes for a while and then waits would keep its peak: freed tensors leave holes between
    those that stay, which glibc returns only if it is asked to.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
