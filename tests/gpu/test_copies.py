"""How fast memory moves between host and device; torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.gpu.figures import median_seconds, show

_GPU_BYTES, _CPU_BYTES = 4 << 30, 16 << 20
_TIMES = 5


def test_copies(device: torch.device) -> None:
    """Bandwidths inside the device, and from and to pageable and pinned memory."""
    num_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    _bandwidth("copy on the device", num_bytes, device, lambda: torch.empty_like(data).copy_(data))
    for name, pinned in (("pageable", False), ("pinned", True)):
        if pinned and device.type != "cuda":
            continue
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        _bandwidth(f"device to {name} host memory", num_bytes, device, lambda h=host: h.copy_(data))
        _bandwidth(f"{name} host memory to device", num_bytes, device, lambda h=host: data.copy_(h))


def _bandwidth(name: str, num_bytes: int, device: torch.device, copy: Callable[[], object]) -> None:
    seconds = median_seconds(device, copy, repeats=_TIMES)
    show(name, f"{num_bytes / seconds / 1e9:.1f} GB/s")
