"""The planned path on the trainer side: each slot's messages go trainer to trainer, the rest is copied on the slot.

Consumes: this slot's part of the plan, its tensors, its leased memory. Produces: filled receive buckets, window by window.
Waits for: the slot's receiver to free a bucket, the peers' messages of the window (each with the deadline).
Unblocked by: the agreement before each window, so that one rank's failure is raised by all. Every rank visits every window.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from resharding.copies import run
from resharding.gather import SendStats
from resharding.part import SlotPart, WindowPart
from resharding.ranks import Ranks
from resharding.sender import WeightSender
from resharding.session import Session
from resharding.tables import Tables


def send(
    sender: WeightSender,
    session: Session,
    part: SlotPart,
    tables: Tables,
    arrays: Sequence[torch.Tensor],
    lease: Sequence[dict[str, Any]],
    *,
    rank_of_slot: Mapping[int, int],
    group: dist.ProcessGroup | None,
    deadline_seconds: float,
) -> SendStats:
    """Sends one session; every rank of the group calls it. Either all ranks return, committed, or all raise.

    `arrays`: the part's source tensors, flat. The lease may end when this has returned or raised.
    """
    ranks = Ranks(group, deadline_seconds, sender.device)
    started = time.monotonic()
    try:
        ranks.together(lambda: sender.open(session, tables, lease=lease))
        moving, packing = _windows(sender, part, tables, arrays, ranks, rank_of_slot)
        verified = ranks.together(sender.finish)
        mark = time.monotonic()
        ranks.together(sender.commit)
    except BaseException as error:
        sender.abort("".join(traceback.format_exception(error)), wait=True)
        traceback.clear_frames(
            error.__traceback__
        )  # else whoever keeps the error keeps the shared buffers mapped
        raise
    return SendStats(
        seconds=time.monotonic() - started,
        commit_seconds=time.monotonic() - mark,
        num_bytes=tables.num_bytes,
        num_buckets=len(part.windows),
        wait_seconds=sender.wait_seconds,
        gather_seconds=moving,
        pack_seconds=packing,
        receiver_seconds=verified.seconds,
    )


def _windows(
    sender: WeightSender,
    part: SlotPart,
    tables: Tables,
    arrays: Sequence[torch.Tensor],
    ranks: Ranks,
    rank_of_slot: Mapping[int, int],
) -> tuple[float, float]:
    """Every window in the plan's order; seconds spent packing and exchanging, and of these packing."""
    bucket = torch.empty(part.send_bucket_bytes, dtype=torch.uint8, device=sender.device)
    filled, moving, packing = None, 0.0, 0.0
    for number, window in enumerate(part.windows):
        buffer = ranks.together(lambda filled=filled: _advance(sender, tables, filled).next_buffer())
        mark = time.monotonic()
        packing += _exchange(window, arrays, bucket, buffer, ranks, rank_of_slot)
        moving += time.monotonic() - mark
        filled = number
    ranks.together(lambda: _advance(sender, tables, filled))
    return moving, packing


def received_bytes(part: SlotPart) -> int:
    """Bytes that reach this slot from others in one session."""
    return sum(message.num_bytes for window in part.windows for message in window.receives)


def _advance(sender: WeightSender, tables: Tables, filled: int | None) -> WeightSender:
    """Hands the window that was filled last to the receiver."""
    if filled is not None:
        sender.send_window(tables.windows[filled].bucket_bytes)
    return sender


def _exchange(
    window: WindowPart,
    arrays: Sequence[torch.Tensor],
    bucket: torch.Tensor,
    buffer: torch.Tensor,
    ranks: Ranks,
    rank_of_slot: Mapping[int, int],
) -> float:
    """Packs what peers need, and fills `buffer` with what this slot needs of them; seconds of packing."""
    mark = time.monotonic()
    run(window.pack, arrays, bucket)
    packing = time.monotonic() - mark
    ranks.exchange(
        [(rank_of_slot[s.peer], bucket[s.offset : s.offset + s.num_bytes]) for s in window.sends],
        [(rank_of_slot[r.peer], buffer[r.offset : r.offset + r.num_bytes]) for r in window.receives],
    )
    return packing
