"""One interface over the kinds of memory a slot's two processes share: segments made by the owner, opened by
the peer."""

from __future__ import annotations

from typing import Any

import torch

from mrl.resharding.wire.cuda_memory import CudaSegment, OpenedCudaSegment
from mrl.resharding.wire.shared_memory import OpenedSegment, SharedSegment

MemorySegment = SharedSegment | CudaSegment
"""A buffer that two processes share, on its owner's side."""
OpenedMemory = OpenedSegment | OpenedCudaSegment
"""A buffer that two processes share, on the peer's side; its `token` names the owner's segment."""


def allocate(num_bytes: int, device: torch.device) -> MemorySegment:
    """A segment where the trainer's weights are: on the GPU, or in ordinary memory."""
    return CudaSegment(num_bytes, device) if device.type == "cuda" else SharedSegment(num_bytes)


def open_segment(description: dict[str, Any]) -> OpenedMemory:
    """Opens what `Segment.export` described."""
    return OpenedCudaSegment(description) if description["kind"] == "cuda" else OpenedSegment(description)


def synchronize(device: torch.device) -> None:
    """What was queued on the device is done before the peer is told; nothing is queued on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
