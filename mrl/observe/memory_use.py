"""What a process has of its GPU and of the host's memory: read from the driver, torch's allocator and the kernel.

`gpu_free` is the device's, whoever holds the rest: the only figure that knows other processes, communicators and memory
outside torch's allocator. An engine's sleeping memory is the other way round: torch still counts it as allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import psutil
import torch


def memory_use(device: torch.device) -> dict[str, float]:
    """Bytes by name: free on the device, reserved and allocated by this process, the most it had allocated since the last
    call; this process's resident memory and what the host has left. Only the host's on CPU."""
    host = {"host_used": psutil.Process().memory_info().rss, "host_free": psutil.virtual_memory().available}
    if device.type == "cpu":
        return {name: float(value) for name, value in host.items()}
    free, _ = torch.cuda.mem_get_info(device)
    own = {
        "gpu_free": free,
        "gpu_reserved": torch.cuda.memory_reserved(device),
        "gpu_allocated": torch.cuda.memory_allocated(device),
        "gpu_peak": torch.cuda.max_memory_allocated(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return {name: float(value) for name, value in (own | host).items()}


def tightest(uses: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Over processes the smallest of what is free, and the largest of what is used, by name.

    >>> tightest([{"gpu_free": 2.0, "gpu_peak": 5.0}, {"gpu_free": 1.0, "gpu_peak": 3.0}])
    {'gpu_free': 1.0, 'gpu_peak': 5.0}
    """
    found: dict[str, list[float]] = {}
    for use in uses:
        for name, value in use.items():
            found.setdefault(name, []).append(value)
    return {name: min(values) if "_free" in name else max(values) for name, values in found.items()}
