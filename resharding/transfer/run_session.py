"""A trainer rank's session: open, send every window, prove, finish and commit; abort on any error.

Waits for receivers to free a bucket and for the peers' messages of a window, each with the deadline. All
ranks agree before each window starts, so all raise one rank's failure. Every rank visits every window. A rank
may feed several engine ranks (separate pools) or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mrl.resharding.planner.slot_plan import SlotPart, WindowPart
from mrl.resharding.transfer.changes import SentWeights
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.copies import run_copies
from mrl.resharding.transfer.proof import TrainerProof
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import Tables
from mrl.resharding.transfer.transports import Transport
from mrl.resharding.wire.mesh_link import TrainerMesh
from mrl.resharding.wire.messages import BucketMessage, Opened


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiverFeed:
    """An engine rank that this trainer rank feeds in a session, and what the session sends it."""

    sender: WeightSender
    tables: Tables
    messages: Sequence[Sequence[BucketMessage]] | None = None
    """By window: messages of other ranks that bring its bytes. None: this rank fills its bucket."""
    receiver: int = 0
    """Number among all engine ranks."""
    lease: Sequence[dict[str, Any]] = ()
    """Memory that the receiver reads; empty between machines."""


def run_session(
    feeds: Sequence[ReceiverFeed],
    session: Session,
    part: SlotPart,
    tensors: Sequence[torch.Tensor],
    lane: Transport | None,
    ranks: RankGroup,
    proof: TrainerProof,
    *,
    mesh: TrainerMesh | None = None,
    reads_buckets: bool = False,
    sent: SentWeights | None = None,
) -> dict[str, float]:
    """Send one session; every rank of the group calls it. All ranks return after the commit, or all raise.

    The memory that the feeds lease may change again after it returns or raises.

    Args:
        part: what this rank packs from `tensors`, its own parameters in the manifest's order.
        lane: None on all ranks if leases cover everything: no slot gets a message, and receivers begin once
            the session is announced. The ranks must have met before.
        proof: this rank's; it covers the receivers of `feeds`. In a session with a proof, all ranks compute
            it together after everything was sent, while the parameters cannot change.
        mesh: needed also by a rank that feeds no engine rank.
        reads_buckets: some engine ranks read the receive buckets of others; equal on all ranks.
        sent: the version before, if changes may be sent; None on all ranks or on none.

    Returns:
        By metric name: seconds of this rank, of its slowest receiver, and bytes of this slot.
    """
    flat, senders = [tensor.reshape(-1) for tensor in tensors], [feed.sender for feed in feeds]
    try:
        opened = ranks.run_on_all(lambda: _open(session, feeds, at_once=lane is None))
        if reads_buckets or sent is not None:
            opened = {r: answer for of_rank in ranks.all_gather(opened) for r, answer in of_rank.items()}
        if reads_buckets:
            _introduce(feeds, {receiver: answer.buckets for receiver, answer in opened.items()})
        if sent is not None:
            sent.begin({receiver: answer.held_version for receiver, answer in opened.items()})
        if lane is not None:
            ranks.run_on_all(lambda: _connect(senders, session, mesh))
        started, packing = time.monotonic(), 0.0
        if lane is not None:
            packing = _send_windows(feeds, part, flat, lane, ranks)
        moved = proved = time.monotonic()
        proofs: Sequence[str | None] = [None] * len(feeds)
        if session.full:
            proofs = proof.exchange_digests(flat, ranks, [feed.receiver for feed in feeds])
            proved = time.monotonic()
        verified = ranks.run_on_all(lambda: [s.finish(p) for s, p in zip(senders, proofs, strict=True)])
        finished = time.monotonic()
        ranks.run_on_all(lambda: [sender.commit() for sender in senders])
    except BaseException as error:
        for sender in senders:
            sender.abort("".join(traceback.format_exception(error)), wait=True)
        if mesh is not None:
            mesh.drop()
        traceback.clear_frames(error.__traceback__)  # else a kept error keeps the buffers mapped
        raise
    reports = [v.seconds for v in verified]
    sizes = {} if sent is None else sent.end(session.to_version, flat, moved - started)
    return (
        sizes
        | {f"{name}_seconds": max(r[name] for r in reports) for name in (reports[0] if reports else ())}
        | {
            "bytes": float(sum(feed.tables.num_bytes for feed in feeds)),
            "move_seconds": moved - started,
            "pack_seconds": packing,
            "commit_seconds": time.monotonic() - finished,
            "prove_seconds": proved - moved,
            "sender_wait_seconds": max((sender.wait_seconds for sender in senders), default=0.0),
        }
    )


def _open(session: Session, feeds: Sequence[ReceiverFeed], at_once: bool) -> dict[int, Opened]:
    """Announce the session to all receivers, then wait for each; return their answers.

    If a receiver is gone, the others learn that the session ended instead of waiting for it to open."""
    for feed in feeds:
        feed.sender.announce(session, feed.tables, lease=feed.lease, at_once=at_once)
    return {feed.receiver: feed.sender.accepted(feed.tables) for feed in feeds}


def _introduce(feeds: Sequence[ReceiverFeed], buckets: Mapping[int, list[dict[str, Any]]]) -> None:
    """Describe to the receivers the buckets that they read."""
    for feed in feeds:
        if feed.tables.neighbours:
            feed.sender.introduce([buckets[receiver] for receiver in feed.tables.neighbours])


def _connect(senders: Sequence[WeightSender], session: Session, mesh: TrainerMesh | None) -> None:
    for sender in senders:
        sender.connect()
    if mesh is not None and not senders:
        mesh.connect(session.session_id, lambda: None)


def _send_windows(
    feeds: Sequence[ReceiverFeed],
    part: SlotPart,
    flat: Sequence[torch.Tensor],
    lane: Transport,
    ranks: RankGroup,
) -> float:
    """Pack and send every window in the plan's order; return the seconds of packing.

    A window is packed while the one before is in flight; it starts once all ranks agree.
    """
    packing = 0.0
    for turn, window in enumerate(part.windows):
        received, seconds = ranks.run_on_all(
            lambda turn=turn, window=window: _ready(feeds, lane, turn, window, flat)
        )
        packing += seconds
        lane.start(turn, window, received)
    ranks.run_on_all(lambda: _last(feeds, lane, len(part.windows)))
    return packing


def _ready(
    feeds: Sequence[ReceiverFeed],
    lane: Transport,
    turn: int,
    window: WindowPart,
    flat: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, float]:
    """Pack a window, then finish the one before and announce it.

    Returns:
        The slot's own receive bucket if this rank fills it, and the seconds of packing.
    """
    _announce_in_flight(feeds, turn - 1)
    with _explained(feeds):
        try:
            bucket, started = lane.bucket(turn), time.monotonic()
            run_copies(window.pack, flat, bucket)
            lane.prepare(turn, window)
            seconds = time.monotonic() - started
        finally:  # else bytes of a session that fails here could arrive in the next one
            arrived = lane.finish(turn - 1)
    return _free(feeds, turn, arrived), seconds


def _free(
    feeds: Sequence[ReceiverFeed], turn: int, arrived: Sequence[BucketMessage] | None
) -> torch.Tensor | None:
    """Announce what has arrived, then wait until the receivers have room for the next window."""
    _announce_arrived(feeds, turn - 1, arrived)
    received = None
    for feed in feeds:
        if feed.messages is None:
            received = feed.sender.next_buffer()
        else:
            feed.sender.wait_for_room()
    return received


def _last(feeds: Sequence[ReceiverFeed], lane: Transport, turns: int) -> None:
    _announce_in_flight(feeds, turns - 1)
    with _explained(feeds):
        arrived = lane.finish(turns - 1)
        lane.drain()
    _announce_arrived(feeds, turns - 1, arrived)


def _announce_in_flight(feeds: Sequence[ReceiverFeed], turn: int) -> None:
    """Announce a window whose messages have started to the receivers that take messages themselves."""
    for feed in feeds if turn >= 0 else ():
        if feed.messages is not None:
            feed.sender.send_window(feed.messages[turn], in_flight=True)


def _announce_arrived(
    feeds: Sequence[ReceiverFeed], turn: int, arrived: Sequence[BucketMessage] | None
) -> None:
    """Announce a window whose bytes are in the bucket shared with the receiver."""
    for feed in feeds if turn >= 0 else ():
        if feed.messages is None:
            feed.sender.send_window(arrived)


@contextlib.contextmanager
def _explained(feeds: Sequence[ReceiverFeed]) -> Any:
    """Turn a lost message into the error of the receiver that gave up, if this rank feeds it."""
    with contextlib.ExitStack() as stack:
        for feed in feeds:
            stack.enter_context(feed.sender.raise_receiver_error())
        yield
