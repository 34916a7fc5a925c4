"""One interface to memory that a slot's two processes share: the owner allocates it, the peer opens it."""

from __future__ import annotations

from typing import Any

import torch

from mrl.resharding.wire.cuda_memory import CudaSegment, OpenedCudaSegment
from mrl.resharding.wire.shared_memory import OpenedSegment, SharedSegment

MemorySegment = SharedSegment | CudaSegment
"""Buffer that two processes share, on its owner's side."""
OpenedMemory = OpenedSegment | OpenedCudaSegment
"""Buffer that two processes share, on the peer's side; its `token` names the owner's segment."""


def allocate(num_bytes: int, device: torch.device) -> MemorySegment:
    """Allocate a segment where the trainer's weights are: on the GPU or in ordinary memory."""
    return CudaSegment(num_bytes, device) if device.type == "cuda" else SharedSegment(num_bytes)


def open_segment(description: dict[str, Any]) -> OpenedMemory:
    """Open what `Segment.export` described."""
    return OpenedCudaSegment(description) if description["kind"] == "cuda" else OpenedSegment(description)


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on the device, so that the peer may be told; do nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
