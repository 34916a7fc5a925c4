"""What a trainer rank does in a session: each slot's messages go where the plan says, the rest is copied out of
leased memory.

Consumes: this rank's part of the plan, its tensors. Produces: filled receive buckets, window by window. Waits
for: receivers to free a bucket, the peers' messages of the window (each with the deadline). Unblocked by: the
agreement before each window starts, so that one rank's failure is raised by all. Every rank visits every window.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from mrl.resharding.planner.slot_plan import SlotMessage, SlotPart, WindowPart
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.copies import run_copies
from mrl.resharding.transfer.proof import TrainerProof
from mrl.resharding.transfer.run_session import Feed, Moved, SendStats, run_session
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.timeline import Timeline
from mrl.resharding.wire.mesh import Outgoing
from mrl.resharding.wire.mesh_link import TrainerMesh
from mrl.resharding.wire.messages import Parcel
from mrl.resharding.wire.parcels import digest_in, trailer


class Lane(Protocol):
    """Takes packed messages to where they are needed, window by window, out of two send buckets in turn: one is
    packed while the other is on its way."""

    def bucket(self, turn: int) -> torch.Tensor:
        """The send bucket of a window, free to pack into."""
        ...

    def start(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        """Starts the packed messages of the window, and fills `received` with what this slot gets of peers."""
        ...

    def finish(self, turn: int) -> list[Parcel] | None:
        """Return when what this slot gets of peers in a started window is there, and what it sends reaches them without
        its doing. The result is what lies in the receive bucket, with its senders' digests; None if nothing is compared."""
        ...

    def drain(self) -> None:
        """Returns when everything that was sent has been taken."""
        ...


class PeerLane:
    """Sends from trainer rank to trainer rank, into the receive bucket of the peer's slot, which its receiver shares.

    A message's digest is taken in the send bucket and travels after it. The receiver compares it with what lies in its
    bucket; this slot's trainer only passes it on."""

    def __init__(
        self, ranks: RankGroup, part: SlotPart, rank_of_slot: Mapping[int, int], *, digests: bool = False
    ) -> None:
        self._ranks, self._rank_of_slot, self._digests = ranks, rank_of_slot, digests
        self._buckets = _send_buckets(part, ranks.device)
        self._works: list[Any] = []
        self._arriving: list[tuple[int, SlotMessage, torch.Tensor]] = []
        """(sender's rank, message, where its digest comes) of the started window."""

    def bucket(self, turn: int) -> torch.Tensor:
        return self._buckets[turn % 2]  # the window before the last was finished

    def start(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        assert received is not None or not window.receives, "a slot that receives has a receiver"
        rank, bucket = self._rank_of_slot, self._buckets[turn % 2]
        sends = [(rank[s.peer], bucket[s.offset : s.offset + s.num_bytes]) for s in window.sends]
        receives = [
            (rank[r.peer], received[r.offset : r.offset + r.num_bytes])  # type: ignore[index]
            for r in window.receives
        ]
        self._arriving = []
        if self._digests:
            trailers = [torch.empty(1, dtype=torch.int64, device=self._ranks.device) for _ in receives]
            self._arriving = [
                (peer, r, t) for (peer, _), r, t in zip(receives, window.receives, trailers, strict=True)
            ]
            sends = [each for peer, data in sends for each in ((peer, data), (peer, trailer(data)))]
            receives = [
                each
                for (peer, data), t in zip(receives, trailers, strict=True)
                for each in ((peer, data), (peer, t))
            ]
        self._works = self._ranks.exchange(sends, receives)

    def finish(self, turn: int) -> list[Parcel] | None:
        works, self._works = self._works, []
        self._ranks.wait(works)
        if not self._digests:
            return None
        return [
            Parcel(rank=rank, offset=r.offset, num_bytes=r.num_bytes, digest=digest_in(came))
            for rank, r, came in self._arriving
        ]

    def drain(self) -> None:
        """Does nothing: every window was finished."""


class MeshLane:
    """Sends from trainer rank to engine rank where they share no memory."""

    def __init__(
        self,
        mesh: TrainerMesh,
        part: SlotPart,
        receiver_of_slot: Mapping[int, int],
        places: Sequence[Mapping[int, int]],
    ) -> None:
        """`receiver_of_slot`: of those that take part; what is for others stays here. `places`: by window, slot -> where
        this rank's message begins in that slot's receive bucket."""
        self._mesh, self._receiver_of_slot, self._places = mesh, receiver_of_slot, places
        self._buckets = _send_buckets(part, mesh.device)
        self._works: list[list[Any]] = [[], []]

    def bucket(self, turn: int) -> torch.Tensor:
        works, self._works[turn % 2] = self._works[turn % 2], []
        self._mesh.wait(works)
        return self._buckets[turn % 2]

    def start(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        bucket, messages = self._buckets[turn % 2], []
        for m in (m for m in window.sends if m.peer in self._receiver_of_slot):
            data, place = bucket[m.offset : m.offset + m.num_bytes], self._places[turn][m.peer]
            messages.append(Outgoing(self._receiver_of_slot[m.peer], data, turn % 2, place))
        self._works[turn % 2] = self._mesh.send(messages, digested=self._mesh.digests)

    def finish(self, turn: int) -> None:
        """Return when the messages reach their receivers, which get the digests too."""
        self._mesh.flush(self._works[turn % 2])

    def drain(self) -> None:
        self.bucket(0)
        self.bucket(1)


def _send_buckets(part: SlotPart, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(part.send_bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]


def send(
    feeds: Sequence[Feed],
    session: Session,
    part: SlotPart,
    tensors: Sequence[torch.Tensor],
    lane: Lane | None,
    ranks: RankGroup,
    proof: TrainerProof,
    *,
    timeline: Timeline,
    mesh: TrainerMesh | None = None,
) -> SendStats:
    """Sends one session; every rank of the group calls it. Either all ranks return, committed, or all raise.

    `part`: what this rank packs, out of `tensors`, its own parameters in the manifest's order. `lane`: None, on all
    ranks, where no slot gets a message, because its receiver reads everything; they have met then. `timeline`: gets what
    this rank does. `proof`: of this rank; the receivers of `feeds` are among its own. What the feeds' leases describe
    may change again when this has returned or raised."""
    flat = [tensor.reshape(-1) for tensor in tensors]

    def move() -> Moved:
        if lane is None:
            return _moved(feeds, part, time.monotonic(), 0.0)
        return _windows(feeds, part, flat, lane, ranks, timeline)

    receivers = [feed.receiver for feed in feeds]
    return run_session(
        ranks,
        session,
        feeds,
        move,
        lambda: proof.said(flat, ranks, receivers),
        mesh=mesh,
        at_once=lane is None,
    )


def parcels_of(part: SlotPart, rank_of_slot: Mapping[int, int]) -> list[list[Parcel]]:
    """By window, the messages a slot receives, with their senders' ranks."""
    return [
        [Parcel(rank=rank_of_slot[r.peer], offset=r.offset, num_bytes=r.num_bytes) for r in window.receives]
        for window in part.windows
    ]


def _windows(
    feeds: Sequence[Feed],
    part: SlotPart,
    flat: Sequence[torch.Tensor],
    lane: Lane,
    ranks: RankGroup,
    timeline: Timeline,
) -> Moved:
    """Packs and sends every window, in the plan's order. A window is packed while the one before is on its way;
    then all ranks agree, and it starts."""
    started = time.monotonic()
    for turn, window in enumerate(part.windows):
        received = ranks.together(
            lambda turn=turn, window=window: _ready(feeds, lane, turn, window, flat, timeline)
        )
        timeline.begin("travel", turn)
        lane.start(turn, window, received)
    ranks.together(lambda: _last(feeds, lane, len(part.windows), timeline))
    return _moved(feeds, part, started, timeline.seconds("pack"))


def _moved(feeds: Sequence[Feed], part: SlotPart, started: float, packing: float) -> Moved:
    size = sum(feed.tables.num_bytes for feed in feeds)
    return Moved(size, len(part.windows), time.monotonic() - started, packing)


def _ready(
    feeds: Sequence[Feed],
    lane: Lane,
    turn: int,
    window: WindowPart,
    flat: Sequence[torch.Tensor],
    timeline: Timeline,
) -> torch.Tensor | None:
    """Packs a window, ends the one before and announces it; returns the slot's own receive bucket where this rank fills
    it."""
    _announce_in_flight(feeds, turn - 1)
    with _explained(feeds):
        try:
            bucket = lane.bucket(turn)
            timeline.begin("pack", turn)
            run_copies(window.pack, flat, bucket)
            timeline.end("pack", turn)
        finally:  # else bytes of a session that failed here could still arrive in the next one
            arrived = lane.finish(turn - 1)
            timeline.end("travel", turn - 1)
    return _free(feeds, turn, arrived)


def _free(feeds: Sequence[Feed], turn: int, arrived: Sequence[Parcel] | None) -> torch.Tensor | None:
    """Announces what has arrived; returns when the receivers have room for the next window."""
    _announce_arrived(feeds, turn - 1, arrived)
    received = None
    for feed in feeds:
        if feed.parcels is None:
            received = feed.sender.next_buffer()
        else:
            feed.sender.wait_turn()
    return received


def _last(feeds: Sequence[Feed], lane: Lane, turns: int, timeline: Timeline) -> None:
    _announce_in_flight(feeds, turns - 1)
    with _explained(feeds):
        arrived = lane.finish(turns - 1)
        timeline.end("travel", turns - 1)
        lane.drain()
    _announce_arrived(feeds, turns - 1, arrived)


def _announce_in_flight(feeds: Sequence[Feed], turn: int) -> None:
    """Announce a window whose messages have started to the receivers that take them themselves."""
    for feed in feeds if turn >= 0 else ():
        if feed.parcels is not None:
            size = feed.tables.windows[turn].bucket_bytes
            feed.sender.send_window(size, feed.parcels[turn], in_flight=True)


def _announce_arrived(feeds: Sequence[Feed], turn: int, arrived: Sequence[Parcel] | None) -> None:
    """Announce a window whose bytes lie in the bucket that this rank shares with the receiver."""
    for feed in feeds if turn >= 0 else ():
        if feed.parcels is None:
            feed.sender.send_window(feed.tables.windows[turn].bucket_bytes, arrived)


@contextlib.contextmanager
def _explained(feeds: Sequence[Feed]) -> Any:
    """A lost message is told with the error of the receiver that gave up, where this rank feeds it."""
    with contextlib.ExitStack() as stack:
        for feed in feeds:
            stack.enter_context(feed.sender.explained())
        yield
