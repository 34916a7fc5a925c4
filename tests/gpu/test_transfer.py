"""The double-buffered sender of the weight sync to a second process on the same device; torch alone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from mrl.config.sections.sync import SyncSection
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.agreement import as_one_rank
from mrl.resharding.planner.cells import PlanCells
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan, PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.proof import TrainerProof
from mrl.resharding.transfer.run_session import ReceiverFeed, SentSession
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import tables_of
from mrl.resharding.wire.digest import digest_bytes
from mrl.resharding.wire.slot_link import SlotLink
from tests.gpu.figures import check, show
from tests.gpu.one_rank import OneRankLane
from tests.gpu.peer import DEADLINE_SECONDS, Peer, flat_bytes

_TENSORS = 16


def test_tensors_arrive_as_they_were_sent(device: torch.device) -> None:
    """Two sessions over the same buffers: the first maps them, the second shows what a weight sync costs."""
    payload_bytes = 1 << 30 if device.type == "cuda" else 64 << 20
    sync = SyncSection(bucket_bytes=min(64 << 20, max(1 << 20, payload_bytes // 8)))
    tensors, manifest, plan = payload(payload_bytes, device, sync.bucket_bytes)
    sent = {f"t{i}": digest_bytes(flat_bytes(tensor)) for i, tensor in enumerate(tensors)}
    peer = Peer(device.type)
    try:
        sender = WeightSender(peer.call("address"), sync, SlotLink(sync.bucket_bytes, device))
        for version in range(2):
            session = Session.new(version - 1, version, plan.digest)
            peer.start("receive", session, manifest)
            started = time.monotonic()
            figures = send_through_buckets(sender, session, plan, manifest, tensors)
            seconds = time.monotonic() - started
            arrived = peer.result()
            check(arrived == sent, f"transfer {version + 1}: {len(sent)} tensors arrived as they were sent")
        size, speed = int(figures["bytes"]), figures["bytes"] / seconds / 1e9
        show(f"sender: {size >> 20} MiB in {len(plan.windows)} buckets, with digests", f"{speed:.1f} GB/s")
        peer.call("release")
        sender.close()
    finally:
        peer.close()


def send_through_buckets(
    sender: WeightSender,
    session: Session,
    plan: Plan,
    manifest: RankManifest,
    tensors: Sequence[torch.Tensor],
) -> dict[str, float]:
    """Send one session through buckets; `manifest` describes `tensors`."""
    part, proof = plan.part(0), TrainerProof(PlanCells(plan), 0, manifest.tensors, [0])
    tables = tables_of(plan.part(1), (), list(proof.needed[0].values()))
    ranks = RankGroup(None, DEADLINE_SECONDS, tensors[0].device)
    lane = OneRankLane(part, tensors[0].device)
    in_flight = SentSession([ReceiverFeed(sender, tables)], session, part, tensors, lane, ranks, proof)
    in_flight.send()
    return in_flight.commit()


def payload(
    num_bytes: int, device: torch.device, bucket_bytes: int
) -> tuple[list[torch.Tensor], RankManifest, Plan]:
    """Return tensors, the manifest of one rank with all of them, and the plan from it to another rank."""
    size = num_bytes // _TENSORS // 2
    data = [torch.randn(size, dtype=torch.float32, device=device).to(torch.bfloat16) for _ in range(_TENSORS)]
    manifest = as_one_rank(CheckpointTensor(f"t{i}", (size,), "bfloat16") for i in range(_TENSORS))
    plan = build_plan(
        [manifest], [manifest], Topology.separate_slots([0]), PlanOptions(bucket_bytes=bucket_bytes)
    )
    return data, manifest, plan
