"""The gather path on the trainer side: full tensors, bucket by bucket, into every slot's sender.

Consumes: each rank's local tensors, a `GatherPlan` (equal on all ranks). Produces: buckets to this slot's receiver.
Waits for: collectives of the trainer's group (each with the deadline), the receiver's acknowledgements.
Unblocked by: the agreement before each bucket, so that one rank's failure is raised by all of them.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mrl.errors import ReshardError
from resharding.assembly import DTYPES
from resharding.gather_plan import Copy, GatherPlan, Window
from resharding.messages import Span
from resharding.ranks import Ranks
from resharding.sender import WeightSender
from resharding.session import Session


@dataclasses.dataclass(frozen=True, slots=True)
class SendStats:
    """One slot's hand-over, in seconds and bytes."""

    seconds: float
    num_bytes: int
    num_buckets: int
    wait_seconds: float
    """Of this sender for its receiver."""
    gather_seconds: float
    """Packing, collectives or messages, unpacking."""
    pack_seconds: float
    """Of these, what this rank's own copies took."""
    commit_seconds: float
    """From every rank's verification to every rank's commit."""
    receiver_seconds: dict[str, float]
    """wait, copy, load, process on the receiver's side."""


def send(
    sender: WeightSender,
    session: Session,
    plan: GatherPlan,
    local_tensors: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | None,
    deadline_seconds: float,
) -> SendStats:
    """Sends one session; every rank of the group calls it. Either all ranks return, committed, or all raise."""
    if session.digest != plan.digest:
        raise ReshardError(
            f"{session} was made for another manifest (digest {session.digest[:12]}, plan {plan.digest[:12]})"
        )
    ranks = Ranks(group, deadline_seconds, sender.device)
    started = time.monotonic()
    try:
        ranks.together(lambda: sender.open(session, plan.tensors))
        moving, packing = _windows(sender, plan, local_tensors, ranks)
        verified = ranks.together(sender.finish)
        mark = time.monotonic()
        ranks.together(sender.commit)
    except BaseException as error:
        sender.abort("".join(traceback.format_exception(error)))
        traceback.clear_frames(
            error.__traceback__
        )  # else whoever keeps the error keeps the shared buffers mapped
        raise
    return SendStats(
        seconds=time.monotonic() - started,
        commit_seconds=time.monotonic() - mark,
        num_bytes=plan.num_bytes,
        num_buckets=len(plan.windows),
        wait_seconds=sender.wait_seconds,
        gather_seconds=moving,
        pack_seconds=packing,
        receiver_seconds=verified.seconds,
    )


def _windows(
    sender: WeightSender, plan: GatherPlan, local_tensors: Sequence[torch.Tensor], ranks: Ranks
) -> tuple[float, float]:
    """Every bucket in the plan's order; seconds spent filling buckets, and of these in own copies."""
    filled: Window | None = None
    moving, packing = 0.0, 0.0
    for window in plan.windows:
        buffer = ranks.together(lambda filled=filled: _advance(sender, filled).next_buffer())
        mark = time.monotonic()
        packing += _fill(buffer, window, plan, local_tensors, ranks)
        moving += time.monotonic() - mark
        filled = window
    ranks.together(lambda: _advance(sender, filled))
    return moving, packing


def _advance(sender: WeightSender, filled: Window | None) -> WeightSender:
    """Hands the bucket that was filled last to the receiver."""
    if filled is not None:
        spans = [
            Span(tensor=b.tensor, start=b.first_byte, num_bytes=b.num_bytes, offset=b.offset)
            for b in filled.boxes
        ]
        sender.send(spans, filled.used_bytes)
    return sender


def _fill(
    buffer: torch.Tensor,
    window: Window,
    plan: GatherPlan,
    local_tensors: Sequence[torch.Tensor],
    ranks: Ranks,
) -> float:
    """Puts the window's full tensors into the buffer, on every rank; seconds of own copies (queued only, on a GPU)."""
    boxes = []
    copying = 0.0
    for box in window.boxes:
        dtype = DTYPES[plan.tensors[box.tensor].dtype]
        boxes.append(buffer[box.offset : box.offset + box.num_bytes].view(dtype).view(box.shape))
    for holder, copies, num_bytes in window.copies:
        mark = time.monotonic()
        if holder == ranks.rank:
            for copy in copies:
                _part(boxes[copy.box], copy.box_start, copy).copy_(
                    _part(local_tensors[copy.local], copy.local_start, copy)
                )
        if ranks.size == 1:
            copying += time.monotonic() - mark
            continue
        packed = torch.empty(num_bytes, dtype=torch.uint8, device=buffer.device)
        views = [_packed(packed, copy, boxes[copy.box].dtype) for copy in copies]
        targets = [_part(boxes[copy.box], copy.box_start, copy) for copy in copies]
        if holder == ranks.rank:
            for view, target in zip(views, targets, strict=True):
                view.copy_(target)
        copying += time.monotonic() - mark
        ranks.broadcast(packed, holder)
        mark = time.monotonic()
        if holder != ranks.rank:
            for view, target in zip(views, targets, strict=True):
                target.copy_(view)
        copying += time.monotonic() - mark
    return copying


def _part(tensor: torch.Tensor, start: tuple[int, ...], copy: Copy) -> torch.Tensor:
    """The box of `copy.shape` at `start`, without gradient."""
    view = tensor.detach()
    for dim, (first, length) in enumerate(zip(start, copy.shape, strict=True)):
        view = view.narrow(dim, first, length)
    return view


def _packed(packed: torch.Tensor, copy: Copy, dtype: torch.dtype) -> torch.Tensor:
    return packed[copy.offset : copy.offset + copy.num_bytes].view(dtype).view(copy.shape)
