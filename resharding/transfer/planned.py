"""The planned path on the trainer side: each slot's messages go where the plan says, the rest is copied on the slot.

Consumes: this rank's part of the plan, its tensors. Produces: filled receive buckets, window by window.
Waits for: receivers to free a bucket, the peers' messages of the window (each with the deadline).
Unblocked by: the agreement before each window, so that one rank's failure is raised by all. Every rank visits every window.
What no plan can place goes the gather path's way after the last window, in the same session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from mrl.resharding.planner.copy_table import run
from mrl.resharding.planner.slot_plan import SlotPart, WindowPart
from mrl.resharding.transfer import gather
from mrl.resharding.transfer.collectives import Ranks
from mrl.resharding.transfer.gather_plan import GatherPlan
from mrl.resharding.transfer.proof import TrainerProof
from mrl.resharding.transfer.run_session import Lead, Moved, SendStats, hold
from mrl.resharding.transfer.sender import WeightSender
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
        """Until everything sent has been taken."""
        ...


class PeerLane:
    """Trainer to trainer, into the receive bucket of the peer's slot, which its receiver shares."""

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
        """Nothing: an exchange returns when it is over."""


class MeshLane:
    """Trainer to engine rank, which shares no memory with any trainer; two send buckets in turn."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Led:
    """A receiver this rank leads, with the tables of its slot."""

    sender: WeightSender
    tables: Tables
    parcels: Sequence[Sequence[Parcel]] | None = None
    """By window, where its bytes come from other ranks' messages. None: this rank fills its bucket."""

    @property
    def received_bytes(self) -> int:
        """Bytes of one session that reach the receiver's slot from others."""
        return sum(window.bucket_bytes for window in self.tables.windows)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What this rank sends from: its part's trainer tensors, flat, and for what no plan can place in their own shapes."""

    part: SlotPart
    arrays: Sequence[torch.Tensor]
    fallback: GatherPlan | None = None
    local_tensors: Sequence[torch.Tensor] = ()


def send(
    led: Sequence[Led],
    session: Session,
    load: Load,
    lane: Lane,
    ranks: Ranks,
    proof: TrainerProof,
    *,
    lease: Sequence[dict[str, Any]] = (),
    mesh: TrainerMesh | None = None,
) -> SendStats:
    """Sends one session; every rank of the group calls it. Either all ranks return, committed, or all raise.

    `proof`: of this rank, whose receivers are those of `led`, in order. `lease`: memory of this rank that its receiver reads; the lease may end when this has returned or raised.
    """
    senders = [one.sender for one in led]

    def move() -> Moved:
        moved = _windows(led, load, lane, ranks)
        if load.fallback is not None:
            moved += gather.move(senders, load.fallback, load.local_tensors, ranks)
        return moved

    leads = [Lead(one.sender, one.tables, lease) for one in led]
    return hold(ranks, session, leads, move, lambda: proof.said(load.arrays, ranks), mesh=mesh)


def parcels_of(part: SlotPart, rank_of_slot: Mapping[int, int]) -> list[list[Parcel]]:
    """By window, the messages a slot receives, with their senders' ranks."""
    return [
        [Parcel(rank=rank_of_slot[r.peer], offset=r.offset, num_bytes=r.num_bytes) for r in window.receives]
        for window in part.windows
    ]


def received_bytes(part: SlotPart) -> int:
    """Bytes that reach this slot from others in one session."""
    return sum(message.num_bytes for window in part.windows for message in window.receives)


def _windows(led: Sequence[Led], load: Load, lane: Lane, ranks: Ranks) -> Moved:
    """Every window in the plan's order."""
    seconds, packing = 0.0, 0.0
    for turn, window in enumerate(load.part.windows):
        bucket, received = ranks.together(lambda turn=turn: _ready(led, lane, turn))
        mark = time.monotonic()
        run(window.pack, load.arrays, bucket)
        packing += time.monotonic() - mark
        lane.exchange(turn, window, received)
        seconds += time.monotonic() - mark
    ranks.together(lambda: _last(led, lane, len(load.part.windows)))
    size = sum(one.tables.num_bytes for one in led)
    return Moved(size, len(load.part.windows), seconds, packing)


def _ready(led: Sequence[Led], lane: Lane, turn: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hands over the window before; the bucket to pack into, and the slot's own bucket where this rank fills it."""
    _announce(led, turn - 1)
    received = None
    for one in led:
        if one.parcels is None:
            received = one.sender.next_buffer()
        else:
            one.sender.wait_turn()
    with _explained(led):
        return lane.bucket(turn), received


def _last(led: Sequence[Led], lane: Lane, turns: int) -> None:
    _announce(led, turns - 1)
    with _explained(led):
        lane.drain()


def _announce(led: Sequence[Led], turn: int) -> None:
    """Tells the receivers that a window's bytes are there or under way."""
    for one in led if turn >= 0 else ():
        parcels = None if one.parcels is None else one.parcels[turn]
        one.sender.send_window(one.tables.windows[turn].bucket_bytes, parcels)


@contextlib.contextmanager
def _explained(led: Sequence[Led]) -> Any:
    """A lost message is told with the error of the receiver that gave up, where this rank leads it."""
    with contextlib.ExitStack() as stack:
        for one in led:
            stack.enter_context(one.sender.explained())
        yield
