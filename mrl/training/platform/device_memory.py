"""Giving a device's memory back, so that the slot's other process can take it."""

from __future__ import annotations

import gc

import torch


def give_back(device: torch.device) -> None:
    """Returns what this process no longer uses to the device; on CPU freed memory is the system's already.

    torch keeps freed blocks in a cache of the process, where no other process can have them. Tensors that hang in
    reference cycles, and blocks that a peer had open, are found first.
    """
    if device.type == "cpu":
        return
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
