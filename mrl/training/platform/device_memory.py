"""Return a device's memory, so that the slot's other process can use it."""

from __future__ import annotations

import gc

import torch

from mrl.processes.free_memory import release_free_memory


def release_cached(device: torch.device) -> None:
    """Return unused memory to the device, or on CPU to the machine.

    torch caches freed blocks in the process, where other processes cannot use them. Tensors in reference
    cycles, and blocks that a peer had open, are collected first.
    """
    if device.type == "cpu":
        release_free_memory()
        return
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
