"""Lanes carry packed messages to where they are needed, window by window.

A lane has two send buckets: one is packed while the other is in flight. After a failure nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mrl.resharding.planner.slot_plan import SlotMessage, SlotPart, WindowPart
from mrl.resharding.transfer.changes import SentWeights
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.copies import run_copies
from mrl.resharding.wire.bucket_messages import digest_in, with_digests, with_trailers
from mrl.resharding.wire.mesh import Outgoing
from mrl.resharding.wire.mesh_link import TrainerMesh
from mrl.resharding.wire.messages import BucketMessage


class PeerTransport:
    """Sends from trainer rank to trainer rank, into the receive bucket of the peer's slot.

    A message's digest is taken in the send bucket and follows the message. The receiver compares it with the
    bytes in its bucket; its slot's trainer only forwards it."""

    def __init__(self, ranks: RankGroup, part: SlotPart, rank_of_slot: Mapping[int, int]) -> None:
        self._ranks, self._rank_of_slot = ranks, rank_of_slot
        self._buckets = _send_buckets(part, ranks.device)
        self._works: list[Any] = []
        self._arriving: list[tuple[int, SlotMessage, torch.Tensor]] = []
        """(sender's rank, message, room for its digest) of the started window."""

    def bucket(self, turn: int) -> torch.Tensor:
        """Return the send bucket of a window, free to pack into."""
        return self._buckets[turn % 2]  # the window before the last was finished

    def prepare(self, turn: int, window: WindowPart) -> None:
        """Do nothing: packed bytes go as they are."""

    def start(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        """Start the window's packed messages; receive the peers' messages for this slot into `received`."""
        assert received is not None or not window.receives, "a slot that receives has a receiver"
        rank, bucket = self._rank_of_slot, self._buckets[turn % 2]
        sends = [(rank[s.peer], bucket[s.offset : s.offset + s.num_bytes]) for s in window.sends]
        receives = [
            (rank[r.peer], received[r.offset : r.offset + r.num_bytes])  # type: ignore[index]
            for r in window.receives
        ]
        receives, trailers = with_trailers(receives, self._ranks.device)
        self._arriving = [(rank[r.peer], r, room) for r, room in zip(window.receives, trailers, strict=True)]
        self._works = self._ranks.exchange(with_digests(sends), receives)

    def finish(self, turn: int) -> list[BucketMessage]:
        """Wait for a started window's messages from and to peers.

        Returns the messages in the receive bucket, with their senders' digests.
        """
        works, self._works = self._works, []
        self._ranks.wait(works)
        return [
            BucketMessage(rank=rank, offset=r.offset, num_bytes=r.num_bytes, digest=digest_in(trailer))
            for rank, r, trailer in self._arriving
        ]

    def drain(self) -> None:
        """Do nothing: every window was finished."""


class MeshTransport:
    """Sends from trainer rank to engine rank if they share no memory."""

    def __init__(
        self,
        mesh: TrainerMesh,
        part: SlotPart,
        receiver_of_slot: Mapping[int, int],
        places: Sequence[Mapping[int, int]],
        sent: SentWeights | None = None,
    ) -> None:
        """Allocate the send buckets.

        Args:
            receiver_of_slot: only engine ranks that take part; messages for others are not sent.
            places: by window, slot -> offset of this rank's message in that slot's receive bucket.
            sent: the version before, if messages may be sent as changes of it."""
        self._sent, self._changes = sent, [{}, {}]
        self._old = _send_buckets(part, mesh.device)[0] if sent is not None else torch.empty(0)
        self._mesh, self._receiver_of_slot, self._places = mesh, receiver_of_slot, places
        self._buckets = _send_buckets(part, mesh.device)
        self._works: list[list[Any]] = [[], []]

    def bucket(self, turn: int) -> torch.Tensor:
        """Return the send bucket of a window, free to pack into."""
        works, self._works[turn % 2] = self._works[turn % 2], []
        self._mesh.wait(works)
        return self._buckets[turn % 2]

    def prepare(self, turn: int, window: WindowPart) -> None:
        """Find what changed in the messages of the bucket, if that is to be sent."""
        sent = self._sent
        if sent is None:
            return
        is_useful, bucket = sent.is_useful, self._buckets[turn % 2]
        if is_useful:
            run_copies(window.pack, sent.tensors, self._old)
        self._changes[turn % 2] = {
            m.peer: sent.packed(
                self._receiver_of_slot[m.peer],
                self._old[m.offset : m.offset + m.num_bytes],
                bucket[m.offset : m.offset + m.num_bytes],
            )
            for m in window.sends
            if m.peer in self._receiver_of_slot
        }

    def start(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        """Start the window's packed messages; engine ranks receive them themselves."""
        bucket, messages, changes = self._buckets[turn % 2], [], self._changes[turn % 2]
        for m in (m for m in window.sends if m.peer in self._receiver_of_slot):
            data, place = bucket[m.offset : m.offset + m.num_bytes], self._places[turn][m.peer]
            receiver, packed = self._receiver_of_slot[m.peer], changes.get(m.peer)
            bucket_number = turn % self._mesh.num_buckets
            messages.append(Outgoing(receiver, data, packed, bucket=bucket_number, offset=place))
        self._works[turn % 2] = self._mesh.send(messages)

    def finish(self, turn: int) -> None:
        """Wait until the messages reach their receivers, with their digests."""
        self._mesh.flush(self._works[turn % 2])

    def drain(self) -> None:
        """Wait until receivers took everything that was sent."""
        self.bucket(0)
        self.bucket(1)


def _send_buckets(part: SlotPart, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(part.send_bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]


Transport = PeerTransport | MeshTransport


def bucket_messages_of(part: SlotPart, rank_of_slot: Mapping[int, int]) -> list[list[BucketMessage]]:
    """Return, by window, the messages a slot receives, with their senders' ranks."""
    return [
        [
            BucketMessage(rank=rank_of_slot[r.peer], offset=r.offset, num_bytes=r.num_bytes)
            for r in window.receives
        ]
        for window in part.windows
    ]
