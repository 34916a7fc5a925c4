"""The planned path on the trainer side: each slot's messages go where the plan says, the rest is copied on
the slot.

Consumes: this rank's part of the plan, its tensors. Produces: filled receive buckets, window by window. Waits
for: receivers to free a bucket, the peers' messages of the window (each with the deadline). Unblocked by: the
agreement before each window, so that one rank's failure is raised by all. Every rank visits every window.
What no plan can place goes the gather path's way after the last window, in the same session.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from mrl.resharding.planner.slot_plan import SlotPart, WindowPart
from mrl.resharding.transfer import gather
from mrl.resharding.transfer.collectives import Ranks
from mrl.resharding.transfer.copies import run
from mrl.resharding.transfer.gather_plan import GatherPlan
from mrl.resharding.transfer.proof import TrainerProof
from mrl.resharding.transfer.run_session import Feed, Moved, SendStats, run_session
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import Tables
from mrl.resharding.wire.mesh_link import TrainerMesh
from mrl.resharding.wire.messages import Parcel


class Lane(Protocol):
    """Takes packed messages to where they are needed, window by window."""

    def bucket(self, turn: int) -> torch.Tensor:
        """The send bucket of a window, free to pack into."""
        ...

    def exchange(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        """Sends the packed messages of the window; fills `received` with what this slot gets of peers."""
        ...

    def drain(self) -> None:
        """Returns when everything that was sent has been taken."""
        ...


class PeerLane:
    """Sends from trainer rank to trainer rank, into the receive bucket of the peer's slot, which its receiver
    shares."""

    def __init__(self, ranks: Ranks, part: SlotPart, rank_of_slot: Mapping[int, int]) -> None:
        self._ranks, self._rank_of_slot = ranks, rank_of_slot
        self._bucket = torch.empty(part.send_bucket_bytes, dtype=torch.uint8, device=ranks.device)

    def bucket(self, turn: int) -> torch.Tensor:
        return self._bucket

    def exchange(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        assert received is not None or not window.receives, "a slot that receives has a receiver"
        rank, bucket = self._rank_of_slot, self._bucket
        self._ranks.exchange(
            [(rank[s.peer], bucket[s.offset : s.offset + s.num_bytes]) for s in window.sends],
            [
                (rank[r.peer], received[r.offset : r.offset + r.num_bytes])  # type: ignore[index]
                for r in window.receives
            ],
        )

    def drain(self) -> None:
        """Does nothing: an exchange returns when it is over."""


class MeshLane:
    """Sends from trainer rank to engine rank where they share no memory, out of two buckets in turn."""

    def __init__(self, mesh: TrainerMesh, part: SlotPart, receiver_of_slot: Mapping[int, int]) -> None:
        self._mesh, self._receiver_of_slot = mesh, receiver_of_slot
        size = part.send_bucket_bytes
        self._buckets = [torch.empty(size, dtype=torch.uint8, device=mesh.device) for _ in range(2)]
        self._works: list[list[Any]] = [[], []]

    def bucket(self, turn: int) -> torch.Tensor:
        works, self._works[turn % 2] = self._works[turn % 2], []
        self._mesh.wait(works)
        return self._buckets[turn % 2]

    def exchange(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        bucket = self._buckets[turn % 2]
        for message in window.sends:
            data = bucket[message.offset : message.offset + message.num_bytes]
            receiver = self._receiver_of_slot[message.peer]
            self._works[turn % 2] += self._mesh.send(data, receiver, digested=self._mesh.digests)

    def drain(self) -> None:
        self.bucket(0)
        self.bucket(1)


def send(
    feeds: Sequence[Feed],
    session: Session,
    part: SlotPart,
    tensors: Sequence[torch.Tensor],
    lane: Lane,
    ranks: Ranks,
    proof: TrainerProof,
    *,
    fallback: GatherPlan | None = None,
    lease: Sequence[dict[str, Any]] = (),
    mesh: TrainerMesh | None = None,
) -> SendStats:
    """Sends one session; every rank of the group calls it. Either all ranks return, committed, or all raise.

    `part`: what this rank packs, out of `tensors`, its own parameters in the manifest's order. `fallback`:
    how what no plan can place is gathered. `proof`: of this rank; its receivers are those of `feeds`, in
    order. `lease`: memory of this rank that its receiver reads; the lease may end when this has returned or
    raised."""
    flat = [tensor.reshape(-1) for tensor in tensors]

    def move() -> Moved:
        moved = _windows(feeds, part, flat, lane, ranks)
        if fallback is not None:
            moved += gather.move([feed.sender for feed in feeds], fallback, tensors, ranks)
        return moved

    return run_session(ranks, session, feeds, move, lambda: proof.said(flat, ranks), lease=lease, mesh=mesh)


def _tables(feed: Feed) -> Tables:
    assert isinstance(feed.content, Tables), "a planned session brings tables"
    return feed.content


def parcels_of(part: SlotPart, rank_of_slot: Mapping[int, int]) -> list[list[Parcel]]:
    """By window, the messages a slot receives, with their senders' ranks."""
    return [
        [Parcel(rank=rank_of_slot[r.peer], offset=r.offset, num_bytes=r.num_bytes) for r in window.receives]
        for window in part.windows
    ]


def _windows(
    feeds: Sequence[Feed], part: SlotPart, flat: Sequence[torch.Tensor], lane: Lane, ranks: Ranks
) -> Moved:
    """Packs and sends every window, in the plan's order."""
    seconds, packing = 0.0, 0.0
    for turn, window in enumerate(part.windows):
        bucket, received = ranks.together(lambda turn=turn: _ready(feeds, lane, turn))
        mark = time.monotonic()
        run(window.pack, flat, bucket)
        packing += time.monotonic() - mark
        lane.exchange(turn, window, received)
        seconds += time.monotonic() - mark
    ranks.together(lambda: _last(feeds, lane, len(part.windows)))
    size = sum(_tables(feed).num_bytes for feed in feeds)
    return Moved(size, len(part.windows), seconds, packing)


def _ready(feeds: Sequence[Feed], lane: Lane, turn: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Announces the window before; returns the bucket to pack into, and the slot's own bucket where this rank
    fills it."""
    _announce(feeds, turn - 1)
    received = None
    for feed in feeds:
        if feed.parcels is None:
            received = feed.sender.next_buffer()
        else:
            feed.sender.wait_turn()
    with _explained(feeds):
        return lane.bucket(turn), received


def _last(feeds: Sequence[Feed], lane: Lane, turns: int) -> None:
    _announce(feeds, turns - 1)
    with _explained(feeds):
        lane.drain()


def _announce(feeds: Sequence[Feed], turn: int) -> None:
    """Tells the receivers that a window's bytes are there or under way."""
    for feed in feeds if turn >= 0 else ():
        parcels = None if feed.parcels is None else feed.parcels[turn]
        feed.sender.send_window(_tables(feed).windows[turn].bucket_bytes, parcels)


@contextlib.contextmanager
def _explained(feeds: Sequence[Feed]) -> Any:
    """A lost message is told with the error of the receiver that gave up, where this rank feeds it."""
    with contextlib.ExitStack() as stack:
        for feed in feeds:
            stack.enter_context(feed.sender.explained())
        yield
