"""Return a device's memory, so that the slot's other process can use it."""

from __future__ import annotations

import gc

import torch


def release_cached(device: torch.device) -> None:
    """Return unused memory to the device; on CPU freed memory is already the system's.

    torch caches freed blocks in the process, where other processes cannot use them. Tensors in reference
    cycles, and blocks that a peer had open, are collected first.
    """
    if device.type == "cpu":
        return
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
