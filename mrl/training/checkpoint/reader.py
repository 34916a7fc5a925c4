"""Read boxes of tensors from a distributed checkpoint in one process, without process groups or Megatron.

The format is torch.distributed.checkpoint's, which Megatron writes: every tensor is split into ranks' chunks.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from mrl.errors import CheckpointError
from mrl.models.stored_names import StoredBox
from mrl.resharding.planner.boxes import Box, intersection
from mrl.training.checkpoint import restricted_pickle

_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    pickle.UnpicklingError,
)
"""Errors of pickle and torch for damaged files that nevertheless match the manifest."""
OPTIMIZER = "optimizer."
"""Prefix of Megatron's names of optimizer states."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """chunk[inner] equals checkpoint tensor[outer], up to leading axes of size 1 of the chunk."""

    key: str
    chunk: Box
    inner: tuple[slice, ...]
    outer: tuple[slice, ...]


class DistributedCheckpoint:
    """Folder in torch's distributed format, open for reading."""

    def __init__(self, folder: Path) -> None:
        """Raise CheckpointError if the folder has no readable index."""
        self.folder, self._reader = folder, FileSystemReader(folder)
        try:
            metadata = restricted_pickle.read_index(folder)  # the reader's own would run code from the file
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        except _UNREADABLE as error:
            raise CheckpointError(f"{folder} is not a readable distributed checkpoint: {error!r}") from error
        self._stored = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not key.startswith(OPTIMIZER)
        }
        self._slabs = {key: _slabs(stored.chunks) for key, stored in self._stored.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every stored tensor but the optimizer's."""
        return {key: tuple(stored.size) for key, stored in self._stored.items()}

    def copies(self, box: StoredBox) -> list[Copy]:
        """Return the copies that write every element of the box once; raise CheckpointError if impossible."""
        target = (box.start, box.shape)
        parts = [(chunk, common) for chunk in self._near(box) if (common := intersection(chunk, target))]
        stored_elements, needed = sum(math.prod(shape) for _, (_, shape) in parts), math.prod(box.shape)
        if stored_elements != needed:
            raise CheckpointError(
                f"{self.folder}: the chunks of {box.key} {list(self._stored[box.key].size)} contain "
                f"{stored_elements} of the {needed} elements of shape {list(box.shape)} at {list(box.start)}"
            )
        return [_copy(box, chunk, common) for chunk, common in parts]

    def read(self, copies: Iterable[tuple[Copy, Tensor]]) -> None:
        """Make the copies, each into its checkpoint tensor. A chunk is read once, in twice its size."""
        by_chunk: dict[MetadataIndex, list[tuple[Copy, Tensor]]] = defaultdict(list)
        for copy, target in copies:
            by_chunk[MetadataIndex(copy.key, copy.chunk[0])].append((copy, target))
        items = [_whole(index, members[0][0].chunk[1]) for index, members in by_chunk.items()]
        try:
            self._reader.read_data(LoadPlan(items), _Distribution(by_chunk, self._stored))
        except _UNREADABLE as error:
            raise CheckpointError(f"tensors in {self.folder} cannot be read: {error!r}") from error

    def _near(self, box: StoredBox) -> Iterator[Box]:
        """Yield the chunks that overlap the box on the first axis."""
        first, last = box.start[0], box.start[0] + box.shape[0]
        for (start, end), chunks in self._slabs[box.key].items():
            if start < last and first < end:
                yield from chunks


class _Distribution(DefaultLoadPlanner):
    """Copies each chunk that was read into its targets."""

    def __init__(
        self,
        copies: Mapping[MetadataIndex, list[tuple[Copy, Tensor]]],
        stored: Mapping[str, TensorStorageMetadata],
    ) -> None:
        super().__init__()
        self._copies, self._stored = copies, stored

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        dtype = self._stored[read_item.storage_index.fqn].properties.dtype
        return torch.empty(read_item.lengths, dtype=dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        for copy, target in self._copies[read_item.storage_index]:
            place = target[copy.outer]
            place.copy_(tensor[copy.inner].view(place.shape))


def _slabs(chunks: Iterable[ChunkStorageMetadata]) -> dict[tuple[int, int], list[Box]]:
    """Group the chunks by their extent on the first axis: (first, end) -> boxes."""
    slabs: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for chunk in chunks:
        start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        slabs[start[0], start[0] + shape[0]].append((start, shape))
    return slabs


def _copy(box: StoredBox, chunk: Box, common: Box) -> Copy:
    start, shape = common
    inner = tuple(slice(s - c, s - c + n) for s, n, c in zip(start, shape, chunk[0], strict=True))
    lead = len(box.start) - len(box.target)
    outer = tuple(
        slice(t + s - b, t + s - b + n)
        for t, s, b, n in zip(box.target, start[lead:], box.start[lead:], shape[lead:], strict=True)
    )
    return Copy(box.key, chunk, inner, outer)


def _whole(index: MetadataIndex, shape: tuple[int, ...]) -> ReadItem:
    """Return the request for one chunk."""
    origin, lengths = torch.Size([0] * len(shape)), torch.Size(shape)
    return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, lengths)
