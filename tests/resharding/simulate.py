"""Executes a plan on plain tensors in one process and counts its writes. Messages are copies of buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.planner.copy_table import target_sizes
from mrl.resharding.planner.plan import Plan
from mrl.resharding.planner.slot_plan import SlotPart
from mrl.resharding.transfer.copies import run_copies, wire_arrays
from tests.resharding.worlds import poisoned

Storages = Sequence[Sequence[torch.Tensor]]
"""Tensors by trainer rank, in the manifest's order."""


def execute(plan: Plan, storages: Storages) -> list[dict[str, torch.Tensor]]:
    """Run the whole plan on poisoned tensors; return parameter name -> tensor per engine rank."""
    sources = [[tensor.reshape(-1) for tensor in storage] for storage in storages]
    parts = [plan.part(slot) for slot in range(plan.topology.num_slots)]
    targets = {part.slot: [poisoned(tensor).view(-1) for tensor in part.engine_tensors] for part in parts}
    for window in range(len(plan.windows)):
        sent = {part.slot: bucket_of(part.send_bucket_bytes) for part in parts}
        for part in parts:
            held = [] if part.trainer_rank is None else sources[part.trainer_rank]
            run_copies(part.windows[window].pack, held, sent[part.slot])
        arrived = {part.slot: received(part, window, sent, parts) for part in parts}
        for part in parts:
            step = part.windows[window]
            lent = [tensor for rank in part.lenders for tensor in sources[rank]]
            for rank in part.neighbours:
                lent += wire_arrays(arrived[plan.topology.engine_slots[rank]])
            run_copies(step.local, lent, targets[part.slot])
            run_copies(step.unpack, arrived[part.slot], targets[part.slot])
    return [
        {t.name: flat.view(t.shape) for t, flat in zip(parts[s].engine_tensors, targets[s], strict=True)}
        for s in plan.topology.engine_slots
    ]


def write_counts(plan: Plan) -> list[dict[str, np.ndarray]]:
    """Count writes per element: per engine rank, name -> uint16 array of the parameter's shape."""
    counted = []
    for part in map(plan.part, plan.topology.engine_slots):
        counts = [np.zeros(math.prod(t.shape), dtype=np.uint16) for t in part.engine_tensors]
        for window in part.windows:
            for table in (window.local, window.unpack):
                for row, rows, cols in zip(table, *target_sizes(table), strict=True):
                    at = row["target_offset"] + np.arange(rows)[:, None] * row["target_stride"]
                    np.add.at(counts[row["target"]], at + np.arange(cols)[None], 1)
        counted.append({t.name: c.reshape(t.shape) for t, c in zip(part.engine_tensors, counts, strict=True)})
    return counted


def bucket_of(num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def received(
    part: SlotPart, window: int, sent: Mapping[int, torch.Tensor], parts: Sequence[SlotPart]
) -> torch.Tensor:
    """Return a slot's receive bucket, with every message copied from its sender's bucket."""
    bucket = bucket_of(part.windows[window].bucket_bytes)
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
