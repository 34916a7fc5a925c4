"""Tune garbage collection and memory of a started driver: its objects stay, freed memory is reused."""

from __future__ import annotations

import ctypes
import gc
import sys

YOUNG, MIDDLE, OLD = 10_000, 10, 100
"""Python's garbage collection thresholds: objects, then collections of the previous generation."""
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
"""glibc's parameters (malloc.h)."""


def tune_driver_memory() -> None:
    """Prepare the process for its steps: garbage collection and memory.

    Freezing exempts objects of the start from collection. A step's samples are some hundred thousand objects,
    in no cycle, that live for some steps: Python's default thresholds would scan them all once or twice per
    step, these after ten million objects.

    glibc returns a freed array of many megabytes to the kernel, which then clears each page of the next one
    (72 MB: 160 ms on a virtual machine whose host took the pages too, 8 ms if the memory is kept). With these
    parameters the process keeps its peak.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)
