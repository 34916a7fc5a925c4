"""Trainer ranks for planned weight syncs: their tensors are in one shared buffer, as in a trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mrl.config.sections.sync import SyncSection
from mrl.models.tensors import LocalTensor, TensorSlice
from mrl.resharding.planner.cells import PlanCells
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.lease import describe_files
from mrl.resharding.transfer.proof import TrainerProof
from mrl.resharding.transfer.run_session import ReceiverFeed, SentSession
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import LeasedTensor, tables_of
from mrl.resharding.transfer.transports import PeerTransport
from mrl.resharding.wire.shared_memory import SharedSegment


class LeasedRank:
    """One trainer rank: `values` in the manifest's order, copied into shared memory."""

    def __init__(self, tensors: Sequence[LocalTensor], values: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.leased: list[LeasedTensor] = []
        end = 0
        for tensor in tensors:
            self.leased.append(LeasedTensor(0, end, tensor.dtype, math.prod(tensor.shape)))
            end += -(-math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize // 64) * 64
        self.segment = SharedSegment(max(end, 64))
        self.arrays = [
            self.segment.buffer[
                a.byte_offset : a.byte_offset + a.num_elements * DTYPES[a.dtype].itemsize
            ].view(DTYPES[a.dtype])
            for a in self.leased
        ]
        self.set(values)

    def set(self, values: Sequence[torch.Tensor]) -> None:
        for array, value in zip(self.arrays, values, strict=True):
            array.copy_(value.reshape(-1))

    def send(
        self,
        sender: WeightSender,
        session: Session,
        plan: Plan,
        slot: int,
        *,
        group: dist.ProcessGroup | None,
        deadline_seconds: float = 20.0,
    ) -> dict[str, float]:
        part = plan.part(slot)
        ranks = RankGroup(group, deadline_seconds, torch.device("cpu"))
        proof = TrainerProof(PlanCells(plan), slot, self._tensors, [slot])
        tables = tables_of(part, self.leased, list(proof.needed[slot].values()))
        lease = describe_files([(self.segment.export()["fd"], self.segment.buffer.numel())])
        in_flight = SentSession(
            [ReceiverFeed(sender, tables, receiver=slot, lease=lease)],
            session,
            part,
            self.arrays,
            PeerTransport(ranks, part, {s: s for s in range(plan.topology.num_slots)}),
            ranks,
            proof,
        )
        in_flight.send()
        return in_flight.commit()

    def close(self) -> None:
        self.arrays.clear()
        self.segment.close()


def spread(weights: Mapping[str, torch.Tensor], size: int) -> list[list[LocalTensor]]:
    """Deal whole checkpoint tensors to `size` ranks in turn."""
    ranks: list[list[LocalTensor]] = [[] for _ in range(size)]
    for n, (name, w) in enumerate(weights.items()):
        zero, shape = (0,) * w.ndim, tuple(w.shape)
        dtype = str(w.dtype).removeprefix("torch.")
        ranks[n % size].append(LocalTensor(name, 0, shape, dtype, (TensorSlice(name, zero, shape, zero),)))
    return ranks


def one_trainer_rank(
    rank: int,
    size: int,
    port: int,
    folder: str,
    addresses: list[str],
    manifests: list[RankManifest],
    session: Any,
) -> dict[str, float]:
    """Send this rank's share of a folder's tensors by the plan (session: its from and to version)."""
    import datetime
    import os
    from pathlib import Path

    from mrl.resharding.planner.plan import PlanOptions, build_plan
    from mrl.resharding.planner.topology import Topology
    from tests.resharding.feeding import read

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=90))
    weights = read(Path(folder))
    ranks = spread(weights, size)
    plan = build_plan(
        [RankManifest.of(r, tensors) for r, tensors in enumerate(ranks)],
        manifests,
        Topology.shared(size),
        PlanOptions(bucket_bytes=16 << 10),
    )
    sender = WeightSender(addresses[rank], SyncSection(bucket_bytes=16 << 10, deadline_seconds=90.0))
    trainer = LeasedRank(ranks[rank], [weights[t.name] for t in ranks[rank]])
    stats = trainer.send(
        sender, Session(*session, plan.digest), plan, rank, group=dist.group.WORLD, deadline_seconds=90.0
    )
    dist.destroy_process_group()
    return stats
