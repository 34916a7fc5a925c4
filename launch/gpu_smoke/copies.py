"""How fast memory moves between host and device, and whether the device has it back; torch alone."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from mrl.launch.gpu_smoke.peer import Peer
from mrl.launch.gpu_smoke.report import Report

_GPU_BYTES, _CPU_BYTES = 4 << 30, 16 << 20
_TIMES = 5
_SMALLEST_SHARE = 0.95
"""Of freed bytes, what the second process must see: torch keeps no more than the ends of segments."""


def run(device: torch.device, report: Report) -> None:
    """Bandwidths; then, on a GPU, storage that is emptied and filled again while a second process watches."""
    num_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    _bandwidth(report, "copy on the device", num_bytes, device, lambda: torch.empty_like(data).copy_(data))
    for name, pinned in (("pageable", False), ("pinned", True)):
        if pinned and device.type != "cuda":
            continue
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        _bandwidth(report, f"device to {name} host memory", num_bytes, device, lambda h=host: h.copy_(data))
        _bandwidth(report, f"{name} host memory to device", num_bytes, device, lambda h=host: data.copy_(h))
    if device.type == "cuda":
        _given_back(data, report)


def _bandwidth(
    report: Report, name: str, num_bytes: int, device: torch.device, copy: Callable[[], object]
) -> None:
    seconds = []
    for _ in range(_TIMES + 1):
        started = time.monotonic()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.monotonic() - started)
    report.figure(name, f"{num_bytes / statistics.median(seconds[1:]) / 1e9:.1f} GB/s")


def _given_back(data: torch.Tensor, report: Report) -> None:
    """Emptied storage stays in torch's cache, invisible to others, until the cache is emptied too."""
    peer, size = Peer("cuda"), data.nbytes

    def free() -> int:
        peer.ask("free")
        return peer.answer()

    try:
        least, cached = size, 0
        for _ in range(_TIMES):
            before = free()
            data.untyped_storage().resize_(0)
            cached = free() - before
            gc.collect()
            torch.cuda.empty_cache()
            least = min(least, free() - before)
            data.untyped_storage().resize_(size)
        report.check(
            least >= _SMALLEST_SHARE * size,
            f"{size >> 20} MiB emptied, then the cache: the second process sees at least",
            f"{least >> 20} MiB ({cached >> 20} before the cache)",
        )
    finally:
        peer.close()
