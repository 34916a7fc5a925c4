"""A trainer rank's session: open, send every window, prove, finish and commit; abort on any error.

Waits for receivers to free a bucket and for the peers' messages of a window, each with the deadline. All
ranks agree before each window starts, so all raise one rank's failure. Every rank visits every window. A rank
may feed several engine ranks (separate pools) or none. `SentSession.send` and `commit` are separate, so that
receivers may load the bytes later than they get them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
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


class SentSession:
    """A session that this rank sends and later commits; every rank of the group makes the same calls.

    A call that raises gives the session up on all ranks. Memory that the feeds lease may change once a call
    raises or `commit` returns."""

    def __init__(
        self,
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
    ) -> None:
        """Describe the session; `send` opens it.

        Args:
            part: what this rank packs from `tensors`, its own parameters in the manifest's order.
            lane: None on all ranks if leases cover everything: no slot gets a message, and receivers begin
                once the session is announced. The ranks must have met before.
            proof: this rank's; it covers the receivers of `feeds`. In a session with a proof, all ranks
                compute it together after everything was sent, while the parameters cannot change.
            mesh: needed also by a rank that feeds no engine rank.
            reads_buckets: some engine ranks read the receive buckets of others; equal on all ranks.
            sent: the version before, if changes may be sent; None on all ranks or on none.
        """
        self._feeds, self._session, self._part, self.lane = feeds, session, part, lane
        self._flat = [tensor.reshape(-1) for tensor in tensors]
        self._ranks, self._proof, self._mesh, self._sent = ranks, proof, mesh, sent
        self._reads_buckets = reads_buckets
        self._senders = [feed.sender for feed in feeds]
        self._proofs: Sequence[str | None] = [None] * len(feeds)
        self._figures: dict[str, float] = {}
        self._lends = True
        """Receivers may read memory of this rank."""

    def send(self, *, until_taken: bool = False) -> None:
        """Open the session, send all windows and compute the proof.

        `until_taken`: return once all receivers have taken everything; the parameters may change then, and
        receivers load what they have when `commit` is called."""
        self._lends = not until_taken
        try:
            with self._given_up_on_error():
                self._send_all(until_taken=until_taken)
        finally:
            self._flat.clear()  # else whoever keeps this session or its error keeps the parameters mapped

    def _send_all(self, *, until_taken: bool) -> None:
        self._open()
        started, packing = time.monotonic(), 0.0
        if self.lane is not None:
            packing = _send_windows(self._feeds, self._part, self._flat, self.lane, self._ranks)
        if until_taken:
            self._ranks.run_on_all(lambda: [sender.wait_until_taken() for sender in self._senders])
        moved = proved = time.monotonic()
        if self._session.full:
            receivers = [feed.receiver for feed in self._feeds]
            self._proofs = self._proof.exchange_digests(self._flat, self._ranks, receivers)
            proved = time.monotonic()
        if self._sent is not None:
            self._figures = self._sent.keep(self._flat, moved - started)
        self._figures |= {
            "move_seconds": moved - started,
            "pack_seconds": packing,
            "prove_seconds": proved - moved,
        }

    def _open(self) -> None:
        """Open the session on all receivers; let those that read buckets or messages know all they need."""
        feeds, ranks, session, sent = self._feeds, self._ranks, self._session, self._sent
        opened = ranks.run_on_all(lambda: _open(session, feeds, at_once=self.lane is None))
        if self._reads_buckets or sent is not None:
            opened = {r: answer for of_rank in ranks.all_gather(opened) for r, answer in of_rank.items()}
        if self._reads_buckets:
            _introduce(feeds, {receiver: answer.buckets for receiver, answer in opened.items()})
        if sent is not None:
            sent.begin({receiver: answer.held_version for receiver, answer in opened.items()})
        if self.lane is not None:
            ranks.run_on_all(lambda: _connect(self._senders, session, self._mesh))

    def commit(self) -> dict[str, float]:
        """Wait until all receivers have loaded and checked everything, then make the version visible.

        Returns:
            By metric name: seconds of this rank, of its slowest receiver, and bytes of this slot.
        """
        ranks, senders = self._ranks, self._senders
        with self._given_up_on_error():
            verified = ranks.run_on_all(
                lambda: [s.finish(p) for s, p in zip(senders, self._proofs, strict=True)]
            )
            finished = time.monotonic()
            ranks.run_on_all(lambda: [sender.commit() for sender in senders])
        if self._sent is not None:
            self._sent.commit(self._session.to_version)
        reports = [v.seconds for v in verified]
        return (
            self._figures
            | {f"{name}_seconds": max(r[name] for r in reports) for name in (reports[0] if reports else ())}
            | {
                "bytes": float(sum(feed.tables.num_bytes for feed in self._feeds)),
                "commit_seconds": time.monotonic() - finished,
                "sender_wait_seconds": max((sender.wait_seconds for sender in senders), default=0.0),
            }
        )

    def give_up(self, reason: str) -> None:
        """Give up the session on this rank; return once receivers have released what they were lent."""
        for sender in self._senders:
            sender.abort(reason, wait=self._lends)
        if self._mesh is not None:
            self._mesh.drop()

    @contextlib.contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.give_up("".join(traceback.format_exception(error)))
            traceback.clear_frames(error.__traceback__)  # else a kept error keeps the buffers mapped
            raise


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
