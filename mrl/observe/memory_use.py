"""Measure a process's GPU and host memory, from the driver, torch's allocator and the kernel.

`gpu_free` is the device's: only it covers other processes, communicators and memory outside torch's
allocator. Conversely, torch still counts an engine's sleeping memory as allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import psutil
import torch


def memory_use(device: torch.device) -> dict[str, float]:
    """Return bytes by name: free on the device; reserved, allocated and peak allocated (since the last call)
    by this process; its resident memory; free host memory. On CPU, the host's only."""
    host = {"host_used": psutil.Process().memory_info().rss, "host_free": psutil.virtual_memory().available}
    if device.type == "cpu":
        return {name: float(value) for name, value in host.items()}
    free, _ = torch.cuda.mem_get_info(device)
    gpu = {
        "gpu_free": free,
        "gpu_reserved": torch.cuda.memory_reserved(device),
        "gpu_allocated": torch.cuda.memory_allocated(device),
        "gpu_peak": torch.cuda.max_memory_allocated(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return {name: float(value) for name, value in (gpu | host).items()}


def tightest(uses: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return by name, over processes, the minimum of free and the maximum of used memory.

    >>> tightest([{"gpu_free": 2.0, "gpu_peak": 5.0}, {"gpu_free": 1.0, "gpu_peak": 3.0}])
    {'gpu_free': 1.0, 'gpu_peak': 5.0}
    """
    by_name: dict[str, list[float]] = {}
    for use in uses:
        for name, value in use.items():
            by_name.setdefault(name, []).append(value)
    return {name: min(values) if "_free" in name else max(values) for name, values in by_name.items()}
