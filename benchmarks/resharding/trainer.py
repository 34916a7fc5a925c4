"""A trainer rank without a Megatron model: its storage layout in shareable memory, filled with made-up bytes.

Has what `planned_sync.SyncedTrainer` requires. Manifests come from the layout; tests compare live models'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.resharding.made_up import MadeUp
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.models.tensors import TRAINER, LocalTensor
from mrl.resharding.planner.manifest import tensor_bytes
from mrl.resharding.planner.trainer_manifests import trainer_rank_manifests
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.lease import describe_device, describe_files
from mrl.resharding.transfer.proof import ReadBoxes
from mrl.resharding.wire import memory

_ALIGN = 128
"""Bytes; parameters of Megatron's buffers start on multiples of 64 elements."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A parameter buffer with Megatron's name."""

    param_data: torch.Tensor


class SharedParameters:
    """Two buffers as in Megatron: dense parameters and experts (`planned_sync.Memory`)."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self._segments = [memory.allocate(max(size, _ALIGN), device) for size in sizes]
        self.buffers: Sequence[Any] = [Buffer(segment.buffer) for segment in self._segments]
        self.leases = 0

    @property
    def num_bytes(self) -> int:
        return sum(buffer.param_data.numel() for buffer in self.buffers)

    def export(self) -> list[tuple[int, int]]:
        return [(s.export()["fd"], s.buffer.numel()) for s in self._segments]

    def describe(self) -> list[dict[str, Any]]:
        """Describe the buffers for one `lease.Lease`."""
        return describe(self._segments)

    def lease(self) -> int:
        self.leases += 1
        return 0

    def release(self) -> None:
        self.leases -= 1

    def close(self) -> None:
        self.buffers = []
        for segment in self._segments:
            segment.close()


def describe(segments: Sequence[memory.MemorySegment]) -> list[dict[str, Any]]:
    """Export each segment anew, for one `lease.Lease`."""
    if segments[0].buffer.device.type == "cuda":
        return describe_device([s.buffer for s in segments])
    return describe_files([(s.export()["fd"], s.buffer.numel()) for s in segments])


class BenchTrainer:
    """One rank of the training layout (`planned_sync.SyncedTrainer`)."""

    dtype = torch.bfloat16
    spec = TRAINER

    def __init__(
        self, hf_config: Mapping[str, Any], layout: Layout, rank: int, *, device: torch.device
    ) -> None:
        self.device = device
        self.hf_config, self.layout, self.family = dict(hf_config), layout, family_of(hf_config)
        self.checkpoint = self.family.checkpoint_tensors(hf_config)
        manifest = trainer_rank_manifests(hf_config, layout)[rank]
        places, ends = [], [0, 0]
        for tensor in manifest.tensors:
            buffer = int(".experts." in tensor.name)
            places.append((tensor, buffer, ends[buffer]))
            ends[buffer] += -(-tensor_bytes(tensor) // _ALIGN) * _ALIGN
        self.memory = SharedParameters(ends, device)
        self._located = [(t, self._view(t, buffer, at), buffer, at) for t, buffer, at in places]

    def local_tensors(self) -> list[tuple[LocalTensor, torch.Tensor, int, int]]:
        return self._located

    def loaded_boxes(self) -> ReadBoxes | None:
        """Return None: no folder was loaded."""
        return None

    def fill(self, version: int) -> None:
        """Write one version of the made-up checkpoint into every parameter."""
        checkpoint = MadeUp(self.checkpoint, version=version)
        for tensor, view, _, _ in self._located:
            checkpoint.fill(tensor, view.view(-1))

    def close(self) -> None:
        self._located = []
        self.memory.close()

    def _view(self, tensor: LocalTensor, buffer: int, at: int) -> torch.Tensor:
        data = self.memory.buffers[buffer].param_data[at : at + tensor_bytes(tensor)]
        return data.view(DTYPES[tensor.dtype]).view(tensor.shape)
