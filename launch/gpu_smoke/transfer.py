"""The double-buffered sender of the weight sync to a second process on the same device; torch alone."""

from __future__ import annotations

import torch

from mrl.config.sections.sync import SyncSection
from mrl.launch.gpu_smoke.peer import Peer, flat_bytes
from mrl.launch.gpu_smoke.report import Report
from mrl.models.tensors import CheckpointTensor, LocalTensor, Piece
from mrl.resharding.transfer import gather, gather_plan
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire.digest import digest
from mrl.resharding.wire.slot_link import SlotLink

_TENSORS = 16


def run(device: torch.device, payload_bytes: int, report: Report) -> None:
    """Two sessions over the same buffers: the first maps them, the second shows what a weight sync costs."""
    sync = SyncSection(bucket_bytes=min(64 << 20, max(1 << 20, payload_bytes // 8)))
    tensors, plan = payload(payload_bytes, device, sync.bucket_bytes)
    sent = {f"t{i}": digest(flat_bytes(tensor)) for i, tensor in enumerate(tensors)}
    peer = Peer(device.type)
    try:
        sender = WeightSender(peer.address, sync, SlotLink(sync.bucket_bytes, device))
        for version in range(2):
            session = Session.new(version - 1, version, plan.digest)
            peer.ask("receive", session.session_id, session.from_version, session.to_version, session.digest)
            stats = gather.send(
                [sender], session, plan, tensors, group=None, device=device, deadline_seconds=60.0
            )
            arrived = peer.answer()["digests"]
            report.check(
                arrived == sent, f"transfer {version + 1}: {len(sent)} tensors arrived as they were sent"
            )
        moved = stats.moved
        speed = moved.num_bytes / stats.seconds / 1e9
        report.figure(
            f"sender: {moved.num_bytes >> 20} MiB in {moved.num_buckets} buckets, with digests",
            f"{speed:.1f} GB/s",
        )
        peer.ask("release")
        peer.answer()
        sender.close()
    finally:
        peer.close()


def payload(
    num_bytes: int, device: torch.device, bucket_bytes: int
) -> tuple[list[torch.Tensor], gather_plan.GatherPlan]:
    """Tensors on the device, and the plan of one rank that holds them whole."""
    size = num_bytes // _TENSORS // 2
    tensors = [
        torch.randn(size, dtype=torch.float32, device=device).to(torch.bfloat16) for _ in range(_TENSORS)
    ]
    checkpoint = [CheckpointTensor(f"t{i}", (size,), "bfloat16") for i in range(_TENSORS)]
    locals_ = [
        LocalTensor(c.name, 0, c.shape, c.dtype, (Piece(c.name, (0,), c.shape, (0,)),)) for c in checkpoint
    ]
    return tensors, gather_plan.build(checkpoint, [locals_], bucket_bytes)
