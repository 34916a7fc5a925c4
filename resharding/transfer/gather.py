"""The gather path on the trainer side: full tensors, bucket by bucket, into every slot's sender.

Consumes: each rank's local tensors, a `GatherPlan` (equal on all ranks). Produces: buckets to this slot's
receiver. Pieces are broadcast; where this rank can read the memory of all others, it copies them out of there. Waits
for: collectives of the trainer's group (each with the deadline), the receiver's acknowledgements. Unblocked by: the agreement before each bucket, so that one rank's failure is raised by all
of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from mrl.errors import WeightSyncError
from mrl.resharding.transfer.assembly import DTYPES
from mrl.resharding.transfer.collectives import Ranks
from mrl.resharding.transfer.gather_plan import GatherBucket, GatherPlan, PieceCopy
from mrl.resharding.transfer.proof import TrainerProof
from mrl.resharding.transfer.run_session import Feed, Moved, SendStats, run_session
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.wire.mesh_link import TrainerMesh
from mrl.resharding.wire.messages import Span
from mrl.resharding.wire.parcels import digest_in, require_sent, trailer


def send(
    senders: Sequence[WeightSender],
    session: Session,
    plan: GatherPlan,
    local_tensors: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    deadline_seconds: float,
    mesh: TrainerMesh | None = None,
    lent: Mapping[int, Sequence[torch.Tensor]] | None = None,
    digests: bool = True,
) -> SendStats:
    """Sends one session to this rank's receivers; every rank of the group calls it. Either all return, or all
    raise. `lent`: the other trainer ranks' tensors, where this one can read all of them. `digests`: of `move`."""
    if session.digest != plan.digest:
        raise WeightSyncError(
            f"{session} was made for another manifest (digest {session.digest[:12]}, plan {plan.digest[:12]})"
        )
    ranks = Ranks(group, deadline_seconds, device)
    feeds = [Feed(sender, plan.content) for sender in senders]
    flat = [tensor.detach().reshape(-1) for tensor in local_tensors]
    return run_session(
        ranks,
        session,
        feeds,
        lambda: move(senders, plan, local_tensors, ranks, lent, digests=digests),
        lambda: proof_of(plan, ranks.rank, len(senders)).said(flat, ranks),
        mesh=mesh,
    )


def proof_of(plan: GatherPlan, rank: int, num_receivers: int) -> TrainerProof:
    """The proof of a session that brings whole tensors; all receivers get the same, so their numbers do not
    matter."""
    return TrainerProof([plan.cells], rank, plan.trainers[rank], range(num_receivers))


def move(
    senders: Sequence[WeightSender],
    plan: GatherPlan,
    local_tensors: Sequence[torch.Tensor],
    ranks: Ranks,
    lent: Mapping[int, Sequence[torch.Tensor]] | None = None,
    *,
    digests: bool,
) -> Moved:
    """Send every bucket in the plan's order to all receivers. `digests`: pieces travel with theirs, and are compared."""
    readable = {**(lent or {}), ranks.rank: local_tensors}
    filled: tuple[GatherBucket, torch.Tensor] | None = None
    damage: list[WeightSyncError] = []
    """Pieces that are not what their ranks sent; raised where all ranks agree."""
    seconds, packing = 0.0, 0.0
    spare = _spare(senders, plan, ranks)
    for bucket in plan.buckets:
        buffer = ranks.together(lambda filled=filled: _advance(senders, filled, spare, damage))
        mark = time.monotonic()
        if len(readable) == ranks.size:
            packing += _read(buffer, bucket, plan, readable) if senders else 0.0
        else:
            packing += _exchange(buffer, bucket, plan, local_tensors, ranks, damage if digests else None)
        seconds += time.monotonic() - mark
        filled = bucket, buffer
    ranks.together(lambda: _send_undamaged(senders, filled, damage))
    return Moved(plan.num_bytes * len(senders), len(plan.buckets), seconds, packing)


def _spare(senders: Sequence[WeightSender], plan: GatherPlan, ranks: Ranks) -> torch.Tensor:
    """What a rank fills that feeds nobody: it takes part in the collectives all the same."""
    size = 0 if senders else max((bucket.used_bytes for bucket in plan.buckets), default=0)
    return torch.empty(size, dtype=torch.uint8, device=ranks.device)


def _advance(
    senders: Sequence[WeightSender],
    filled: tuple[GatherBucket, torch.Tensor] | None,
    spare: torch.Tensor,
    damage: Sequence[WeightSyncError],
) -> torch.Tensor:
    """Sends the bucket that was filled last; returns the next one to fill."""
    _send_undamaged(senders, filled, damage)
    return senders[0].next_buffer() if senders else spare


def _send_undamaged(
    senders: Sequence[WeightSender],
    filled: tuple[GatherBucket, torch.Tensor] | None,
    damage: Sequence[WeightSyncError],
) -> None:
    if damage:
        raise damage[0]
    _send_bucket(senders, filled)


def _send_bucket(senders: Sequence[WeightSender], filled: tuple[GatherBucket, torch.Tensor] | None) -> None:
    if filled is None:
        return
    bucket, buffer = filled
    spans = [
        Span(tensor=b.tensor, start=b.first_byte, num_bytes=b.num_bytes, offset=b.offset)
        for b in bucket.boxes
    ]
    for number, sender in enumerate(senders):
        if number:
            sender.next_buffer()[: bucket.used_bytes].copy_(buffer[: bucket.used_bytes])
        sender.send(spans, bucket.used_bytes)


def _boxes(buffer: torch.Tensor, bucket: GatherBucket, plan: GatherPlan) -> list[torch.Tensor]:
    """The bucket's boxes in the buffer."""
    boxes = []
    for box in bucket.boxes:
        dtype = DTYPES[plan.tensors[box.tensor].dtype]
        boxes.append(buffer[box.offset : box.offset + box.num_bytes].view(dtype).view(box.shape))
    return boxes


def _read(
    buffer: torch.Tensor,
    bucket: GatherBucket,
    plan: GatherPlan,
    tensors: Mapping[int, Sequence[torch.Tensor]],
) -> float:
    """Copies the bucket's full tensors out of the memory of all ranks; seconds (queued only, on a GPU)."""
    mark, boxes = time.monotonic(), _boxes(buffer, bucket, plan)
    for rank, copies, _ in bucket.copies:
        _copy_pieces(boxes, copies, tensors[rank])
    return time.monotonic() - mark


def _copy_pieces(
    boxes: Sequence[torch.Tensor], copies: Sequence[PieceCopy], tensors: Sequence[torch.Tensor]
) -> None:
    for copy in copies:
        source = _part(tensors[copy.local], copy.local_start, copy)
        _part(boxes[copy.box], copy.box_start, copy).copy_(source)


def _exchange(
    buffer: torch.Tensor,
    bucket: GatherBucket,
    plan: GatherPlan,
    local_tensors: Sequence[torch.Tensor],
    ranks: Ranks,
    damage: list[WeightSyncError] | None,
) -> float:
    """Puts the bucket's full tensors into the buffer, on every rank, by broadcasts; seconds of own copies (queued only,
    on a GPU). `damage` gets an error for each piece that is not what its rank sent; None: nothing is compared."""
    boxes, copying = _boxes(buffer, bucket, plan), 0.0
    for rank, copies, num_bytes in bucket.copies:
        mark = time.monotonic()
        if rank == ranks.rank:
            _copy_pieces(boxes, copies, local_tensors)
        packed = torch.empty(num_bytes, dtype=torch.uint8, device=buffer.device)
        views = [_packed(packed, copy, boxes[copy.box].dtype) for copy in copies]
        targets = [_part(boxes[copy.box], copy.box_start, copy) for copy in copies]
        if rank == ranks.rank:
            for view, target in zip(views, targets, strict=True):
                view.copy_(target)
        copying += time.monotonic() - mark
        # The digest is the sender's of what it packed, before any of it is sent.
        compared = damage is not None
        sent = trailer(packed) if compared and rank == ranks.rank else packed.new_empty(1, dtype=torch.int64)
        ranks.broadcast(packed, rank)
        if compared:
            ranks.broadcast(sent, rank)
            _compare(packed, digest_in(sent), rank, damage)
        mark = time.monotonic()
        if rank != ranks.rank:
            for view, target in zip(views, targets, strict=True):
                target.copy_(view)
        copying += time.monotonic() - mark
    return copying


def _compare(packed: torch.Tensor, sent: int, rank: int, damage: list[WeightSyncError]) -> None:
    """Note if the bytes of `rank`, its own too, are not those of the digest that it sent."""
    try:
        require_sent(packed, sent, rank)
    except WeightSyncError as error:
        damage.append(error)


def _part(tensor: torch.Tensor, start: tuple[int, ...], copy: PieceCopy) -> torch.Tensor:
    """The box of `copy.shape` at `start`, without gradient."""
    view = tensor.detach()
    for dim, (first, length) in enumerate(zip(start, copy.shape, strict=True)):
        view = view.narrow(dim, first, length)
    return view


def _packed(packed: torch.Tensor, copy: PieceCopy, dtype: torch.dtype) -> torch.Tensor:
    return packed[copy.offset : copy.offset + copy.num_bytes].view(dtype).view(copy.shape)
