"""A plan executed on plain arrays in one process: what every slot's tables write, and how often. numpy or torch arrays.

Owns no transport: messages are copies between byte arrays. The order in which real processes may do the same is proved
in rehearsal.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrl.errors import WeightSyncError
from mrl.models.tensors import LocalTensor
from mrl.resharding.planner.copy_table import target_sizes
from mrl.resharding.planner.manifest import Replicas
from mrl.resharding.planner.plan import Plan
from mrl.resharding.planner.slot_plan import SlotPart, WindowPart
from mrl.resharding.transfer.copies import numpy_dtype, run_copies

Storage = Mapping[Any, Any] | Sequence[Any]
"""One rank's arrays: a sequence in the manifest's order, or a mapping by name, or by (chunk, name) with several chunks."""

POISON = 0xFF
"""Byte that engine arrays are filled with before; as bfloat16 or float32 it reads NaN."""


def execute(plan: Plan, source_storages: Sequence[Storage]) -> list[dict[str, Any]]:
    """Run the whole plan. Returns, per engine rank, parameter name -> array of the manifest's shape.

    Trainer arrays have the manifests' shapes; numpy ones hold bfloat16 as uint16 (or any dtype, where both
    sides agree). Engine arrays start poisoned. WeightSyncError where an array is missing or has another shape.
    """
    sources = [
        [flat(array) for array in listed(storage, tensors_of(plan.trainers, rank), rank=rank)]
        for rank, storage in enumerate(source_storages)
    ]
    parts = [plan.part(slot) for slot in range(plan.topology.num_slots)]
    targets = {part.slot: poisoned(part.engine_tensors, sources, plan) for part in parts}
    for window in range(len(plan.windows)):
        sent = {
            part.slot: pack(part.windows[window], arrays_of(part, sources), part.send_bucket_bytes, sources)
            for part in parts
        }
        for part in parts:
            step = part.windows[window]
            bucket = gathered(part, window, sent, parts, sources)
            run_copies(step.local, lent_to(part, sources), targets[part.slot])
            run_copies(step.unpack, bucket, targets[part.slot])
    by_rank = sorted(
        (part for part in parts if part.engine_rank is not None), key=lambda p: p.engine_rank or 0
    )
    return [
        {t.name: array.reshape(t.shape) for t, array in zip(p.engine_tensors, targets[p.slot], strict=True)}
        for p in by_rank
    ]


def write_counts(plan: Plan) -> list[dict[str, np.ndarray]]:
    """How often the plan writes each element: per engine rank, name -> uint16 array of the parameter's shape."""
    counted = {}
    for slot, rank in ((slot, rank) for rank, slot in enumerate(plan.topology.engine_slots)):
        part = plan.part(slot)
        counts = [np.zeros(math.prod(t.shape), dtype=np.uint16) for t in part.engine_tensors]
        for window in part.windows:
            for table in (window.local, window.unpack):
                for row, rows, cols in zip(table, *target_sizes(table), strict=True):
                    at = row["target_offset"] + np.arange(rows)[:, None] * row["target_stride"]
                    np.add.at(counts[row["target"]], at + np.arange(cols)[None], 1)
        counted[rank] = {t.name: c.reshape(t.shape) for t, c in zip(part.engine_tensors, counts, strict=True)}
    return [counted[rank] for rank in sorted(counted)]


def tensors_of(groups: Sequence[Replicas], rank: int) -> tuple[LocalTensor, ...]:
    """The tensors of one rank."""
    return next(group.tensors for group in groups if rank in group.ranks)


def listed(storage: Storage, tensors: Sequence[LocalTensor], *, rank: int) -> list[Any]:
    """A rank's arrays in the manifest's order, shapes checked."""
    if isinstance(storage, Mapping):
        keys = [(t.chunk, t.name) if (t.chunk, t.name) in storage else t.name for t in tensors]
        if lacking := [key for key in keys if key not in storage]:
            raise WeightSyncError(f"trainer rank {rank} has no array for {lacking[:8]}")
        arrays = [storage[key] for key in keys]
    else:
        arrays = list(storage)
    if len(arrays) != len(tensors):
        raise WeightSyncError(
            f"trainer rank {rank} has {len(arrays)} arrays, its manifest {len(tensors)} tensors"
        )
    for array, tensor in zip(arrays, tensors, strict=True):
        if tuple(array.shape) != tensor.shape:
            raise WeightSyncError(
                f"trainer rank {rank}: {tensor.name} is {tuple(array.shape)}, the manifest says {tensor.shape}"
            )
    return arrays


def flat(array: Any) -> Any:
    """A contiguous array as one dimension."""
    return (
        np.ascontiguousarray(array).reshape(-1)
        if isinstance(array, np.ndarray)
        else array.contiguous().view(-1)
    )


def arrays_of(part: SlotPart, sources: Sequence[list[Any]]) -> list[Any]:
    """The trainer arrays of a slot; none where it has no trainer rank."""
    return [] if part.trainer_rank is None else sources[part.trainer_rank]


def lent_to(part: SlotPart, sources: Sequence[list[Any]]) -> list[Any]:
    """The trainer arrays that the slot's engine rank reads."""
    return [array for rank in part.lenders for array in sources[rank]]


def poisoned(tensors: Sequence[LocalTensor], sources: Sequence[list[Any]], plan: Plan) -> list[Any]:
    """Engine arrays filled with POISON, of the kind the sources are."""
    if not uses_numpy(sources):
        import torch

        return [
            bytes_like(sources, math.prod(t.shape) * getattr(torch, t.dtype).itemsize).view(
                getattr(torch, t.dtype)
            )
            for t in tensors
        ]
    actual = {}
    for rank, arrays in enumerate(sources):
        for tensor, array in zip(tensors_of(plan.trainers, rank), arrays, strict=True):
            actual.setdefault(tensor.dtype, array.dtype)
    kinds = [actual.get(t.dtype, numpy_dtype(t.dtype)) for t in tensors]
    return [
        bytes_like(sources, math.prod(t.shape) * k.itemsize).view(k)
        for t, k in zip(tensors, kinds, strict=True)
    ]


def uses_numpy(sources: Sequence[list[Any]]) -> bool:
    first = next((array for arrays in sources for array in arrays), None)
    return first is None or isinstance(first, np.ndarray)


def bytes_like(sources: Sequence[list[Any]], size: int) -> Any:
    """`size` poisoned bytes: numpy's, or torch's on the sources' device."""
    if uses_numpy(sources):
        return np.full(size, POISON, dtype=np.uint8)
    import torch

    device = next((array.device for arrays in sources for array in arrays), None)
    return torch.full((size,), POISON, dtype=torch.uint8, device=device)


def pack(window: WindowPart, arrays: list[Any], size: int, sources: Sequence[list[Any]]) -> Any:
    """One slot's send bucket for one window."""
    bucket = bytes_like(sources, size)
    run_copies(window.pack, arrays, bucket)
    return bucket


def gathered(
    part: SlotPart,
    window: int,
    sent: Mapping[int, Any],
    parts: Sequence[SlotPart],
    sources: Sequence[list[Any]],
) -> Any:
    """One slot's receive bucket: every message copied from its sender's bucket."""
    bucket = bytes_like(sources, part.receive_bucket_bytes)
    for message in part.windows[window].receives:
        sends = parts[message.peer].windows[window].sends
        out = next((m for m in sends if m.peer == part.slot), None)
        if out is None or out.num_bytes != message.num_bytes:
            raise WeightSyncError(
                f"window {window}: slot {part.slot} expects {message}, slot {message.peer} sends {out}"
            )
        bucket[message.offset : message.offset + message.num_bytes] = sent[message.peer][
            out.offset : out.offset + out.num_bytes
        ]
    return bucket


def num_elements(table: np.ndarray) -> int:
    """Elements that a table of copies writes."""
    rows, cols = target_sizes(table)
    return int((rows * cols).sum())
