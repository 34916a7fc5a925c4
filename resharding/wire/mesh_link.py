"""A sender's and a receiver's end of a mesh: buckets as messages, each checked by the digest that follows it.

Messages leave from the trainer rank's own buckets (`transfer/transports.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.bucket_messages import require_digest, split
from mrl.resharding.wire.channel import Lost
from mrl.resharding.wire.delta import apply_changes
from mrl.resharding.wire.meeting import Meeting
from mrl.resharding.wire.mesh import Mesh, Outgoing
from mrl.resharding.wire.messages import BucketMessage
from mrl.resharding.wire.nixl_mesh import NixlMesh
from mrl.resharding.wire.shared_buckets import SharedBuckets

Joined = Mesh | NixlMesh
"""One rank among all ranks of a weight sync."""
KINDS: dict[str, type[Mesh] | type[NixlMesh]] = {"distributed": Mesh, "nixl": NixlMesh}
"""Mesh class by `sync.transport`."""


class TrainerMesh:
    """A trainer rank's membership in a mesh, shared by all receivers that it feeds."""

    def __init__(
        self,
        kind: str,
        store: str,
        *,
        rank: int,
        num_trainers: int,
        num_receivers: int,
        device: torch.device,
        deadline_seconds: float,
        packs: bool = False,
    ) -> None:
        """Describe the mesh; `connect` joins it.

        Args:
            kind: a key of `KINDS`.
            store: address of the trainers' torch.distributed store (`Meeting`).
            packs: messages may be sent as changes of the version before; only for kind distributed on CPUs.
        """
        self.kind = kind
        self.packs = packs
        self.num_buckets = 2
        """Receive buckets of every engine rank, which the windows take in turn."""
        self.device = device
        self.rank, self.num_trainers = rank, num_trainers
        self._store, self._receivers = store, list(range(num_receivers))
        self._seconds = deadline_seconds
        self._token: str | None = None
        self._mesh: Joined | None = None
        self._lost: dict[str, list[Lost]] = {}

    def describe(self, session_id: str, receiver: int) -> dict[str, Any]:
        """Describe what engine rank `receiver` needs to join; the first session's id names the group."""
        self._token = self._token or session_id
        return {
            "kind": self.kind,
            "token": self._token,
            "store": self._store,
            "rank": self._rank_of(receiver),
            "size": self._size,
            "packs": self.packs,
            "num_buckets": self.num_buckets,
        }

    def keep(self, receivers: Sequence[int]) -> None:
        """Set the engine ranks that take part; if they changed, all ranks meet anew."""
        if list(receivers) != self._receivers:
            self.drop()
            self._receivers = list(receivers)

    @property
    def _size(self) -> int:
        return self.num_trainers + len(self._receivers)

    def _rank_of(self, receiver: int) -> int:
        return self.num_trainers + self._receivers.index(receiver)

    def connect(self, session_id: str, lost: Lost) -> None:
        """Meet the other ranks, or keep the group. `lost`: for one of this rank's receivers."""
        watched = self._lost.get(session_id, [])
        self._lost = {session_id: [*watched, lost]}
        if self._mesh is None:
            self._token = self._token or session_id
            meeting = Meeting(self._store, self._token, self.rank, self._size)
            self._mesh = KINDS[self.kind](
                meeting, device=self.device, deadline_seconds=self._seconds, lost=self._any_lost
            )

    def _any_lost(self) -> str | None:
        """Return why one of the open session's receivers can never answer, or None."""
        reasons = (lost() for listed in self._lost.values() for lost in listed)
        return next((reason for reason in reasons if reason), None)

    def send(self, messages: Sequence[Outgoing]) -> list[Any]:
        """Start messages to engine ranks; end them with `wait`."""
        if self._mesh is None:
            raise WeightSyncError("a message was sent before the session's ranks had met")
        ranked = [dataclasses.replace(m, rank=self._rank_of(m.rank)) for m in messages]
        if self.packs and isinstance(self._mesh, Mesh):
            return self._mesh.send_packed(ranked)
        return self._mesh.send(ranked)

    def flush(self, works: Sequence[Any]) -> None:
        """Wait until the messages reach their receivers without further work of this rank."""
        if self._mesh is not None:
            self._mesh.flush(works)

    def wait(self, works: Sequence[Any]) -> None:
        if works:
            assert self._mesh is not None
            self._mesh.wait(works, f"messages of trainer rank {self.rank} were not taken")

    def drop(self) -> None:
        mesh, self._mesh, self._token = self._mesh, None, None
        if mesh is not None:
            mesh.close()


class MeshLink:
    """The sender's end of a mesh towards one engine rank."""

    def __init__(self, mesh: TrainerMesh, receiver: int, num_bytes: int) -> None:
        self.device = mesh.device
        self._mesh, self._receiver, self._num_bytes = mesh, receiver, num_bytes
        self._session_id = ""

    def describe(self, session_id: str) -> list[dict[str, Any]]:
        self._session_id = session_id
        return [self._mesh.describe(session_id, self._receiver) | {"num_bytes": self._num_bytes}]

    def connect(self, lost: Lost) -> None:
        """Meet the other ends, after every receiver was told to join."""
        self._mesh.connect(self._session_id, lost)

    def drop(self) -> None:
        """Leave the group, so that no bytes of a failed session reach the next one."""
        self._mesh.drop()

    def close(self) -> None:
        self.drop()


class MeshInbox:
    """The engine rank's end of a mesh."""

    def __init__(
        self, descriptions: Sequence[dict[str, Any]], *, device: torch.device, deadline_seconds: float
    ) -> None:
        (self._description,) = descriptions
        self._device, self._seconds = device, deadline_seconds
        self.num_bytes, self._num_buckets = self._description["num_bytes"], self._description["num_buckets"]
        self._mesh: Joined | None = None
        self._shared = SharedBuckets(self.num_bytes, self._num_buckets) if device.type == "cpu" else None
        """Buckets that the node's other engine ranks may read; None on GPUs."""
        self._own: list[torch.Tensor] = []
        if self._shared is None:
            self._own = [
                torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
                for _ in range(self._num_buckets)
            ]
        self._on_host: dict[int, torch.Tensor] = {}
        """On GPUs: windows kept for later, in page-locked memory."""

    @property
    def packs(self) -> bool:
        """True if messages may come as changes of the version before."""
        return self._description["packs"]

    def is_for(self, descriptions: Sequence[dict[str, Any]]) -> bool:
        return self._mesh is not None and list(descriptions) == [self._description]

    def connect(self, lost: Lost) -> None:
        if self._mesh is not None:
            self._mesh.lost = lost
            return
        d = self._description
        self._mesh = KINDS[d["kind"]](
            Meeting(d["store"], d["token"], d["rank"], d["size"]),
            device=self._device,
            deadline_seconds=self._seconds,
            lost=lost,
            buckets=[self._bucket(n) for n in range(self._num_buckets)],
        )

    def share(self, session_id: str) -> list[dict[str, Any]]:
        """Begin to count a session's windows; describe the buckets to other engine ranks of the node."""
        if self._shared is None:
            return []
        self._shared.begin(session_id)
        return self._shared.export()

    def take(
        self,
        window: int,
        num_bytes: int,
        parcels: Sequence[BucketMessage] | None = None,
        held: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the first `num_bytes` of a window's bucket, filled by the parcels' senders; valid until a
        window takes the bucket again.

        `held`: the same bytes in the version before, or empty; it becomes those of this version."""
        if self._mesh is None or parcels is None:
            raise WeightSyncError("a window came before the session's ranks had met, or without its messages")
        bucket = self._bucket(window)[:num_bytes]
        expected = split(bucket, parcels)
        if self.packs and isinstance(self._mesh, Mesh):
            messages = self._mesh.receive_packed(expected)
        else:
            messages = [(digest, None) for digest in self._mesh.receive(expected)]
        for (rank, data), (digest, packed), place in zip(expected, messages, parcels, strict=True):
            if packed is not None:
                if held is None or not held.numel():
                    raise WeightSyncError(f"trainer rank {rank} sends changes of bytes that are not here")
                data.copy_(held[place.offset : place.offset + place.num_bytes])
                apply_changes(data, packed)
            require_digest(data, digest, rank)
        if held is not None:
            held.resize_(num_bytes).copy_(bucket)
        if self._shared is not None:
            self._shared.arrived()
        return bucket

    def keep(self, window: int, received: torch.Tensor) -> None:
        """Keep what `take` returned until `kept`: in its bucket, or on the host if there are only some."""
        if self._shared is None:
            room = self._on_host.get(window)
            if room is None or room.numel() != received.numel():
                room = torch.empty_like(received, device="cpu", pin_memory=True)
            self._on_host[window] = room.copy_(received)
        elif window >= self._num_buckets:
            raise WeightSyncError(
                f"window {window} would overwrite another one: this rank has {self._num_buckets} buckets"
            )

    def kept(self, window: int, num_bytes: int) -> torch.Tensor:
        """Return a window's bytes that `keep` got in this session; on GPUs valid like those of `take`."""
        bucket = self._bucket(window)[:num_bytes]
        return bucket if self._shared is not None else bucket.copy_(self._on_host[window])

    def _bucket(self, window: int) -> torch.Tensor:
        if self._shared is not None:
            return self._shared.bucket(window)
        return self._own[window % self._num_buckets]

    def drop(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    def close(self) -> None:
        self.drop()
        self._own, self._on_host = [], {}
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()
