"""A sender's and a receiver's end of a mesh: buckets as messages, each checked by a digest that follows it.

The sender's two buffers are ordinary memory, made when first needed: planned sessions send from a bucket of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.channel import Lost
from mrl.resharding.wire.digest import digest
from mrl.resharding.wire.faults import Faults
from mrl.resharding.wire.mesh import Meeting, Mesh
from mrl.resharding.wire.messages import Parcel

_SIGN = 1 << 63


def trailer(data: torch.Tensor) -> torch.Tensor:
    """[1] int64: the digest of a message, which travels after it."""
    value = digest(data)
    return torch.tensor([value - 2 * _SIGN if value >= _SIGN else value], device=data.device)


class TrainerMesh:
    """A trainer rank's membership in a mesh, common to all receivers that it feeds."""

    def __init__(
        self,
        store: tuple[str, int],
        *,
        rank: int,
        num_trainers: int,
        num_receivers: int,
        device: torch.device,
        deadline_seconds: float,
        digests: bool,
    ) -> None:
        """`store`: host and port of the trainers' torch.distributed store."""
        self.device, self.digests = device, digests
        self.rank, self.num_trainers = rank, num_trainers
        self._store, self._size = store, num_trainers + num_receivers
        self._seconds = deadline_seconds
        self._token: str | None = None
        self._mesh: Mesh | None = None

    def describe(self, session_id: str, receiver: int) -> dict[str, Any]:
        """What engine rank `receiver` needs to join; the first session's id names the group."""
        self._token = self._token or session_id
        host, port = self._store
        return {
            "kind": MeshInbox.KIND,
            "token": self._token,
            "host": host,
            "port": port,
            "rank": self.num_trainers + receiver,
            "size": self._size,
            "feeder": self.rank,
            "digests": self.digests,
        }

    def connect(self, session_id: str, lost: Lost) -> None:
        if self._mesh is None:
            self._token = self._token or session_id
            meeting = Meeting(*self._store, self._token, self.rank, self._size)
            self._mesh = Mesh(meeting, device=self.device, deadline_seconds=self._seconds, lost=lost)

    def send(self, messages: Sequence[tuple[int, torch.Tensor]], *, digested: bool) -> list[Any]:
        """Starts messages as (engine rank, data), each followed by its digest where asked; `wait` ends them."""
        if self._mesh is None:
            raise WeightSyncError("a message before the session's ranks had met")
        sends = []
        for receiver, data in messages:
            rank = self.num_trainers + receiver
            sends += [(rank, data), (rank, trailer(data))] if digested else [(rank, data)]
        return self._mesh.start(sends, ())

    def wait(self, works: Sequence[Any]) -> None:
        if works:
            assert self._mesh is not None
            self._mesh.wait(works, f"trainer rank {self.rank} sent what was not taken")

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
        self._buffers: list[torch.Tensor] = []
        self._works: list[list[Any]] = [[], []]

    def describe(self, session_id: str) -> list[dict[str, Any]]:
        self._session_id = session_id
        return [self._mesh.describe(session_id, self._receiver) | {"num_bytes": self._num_bytes}]

    def connect(self, lost: Lost) -> None:
        self._mesh.connect(self._session_id, lost)

    def buffer(self, which: int) -> torch.Tensor:
        self._buffers = self._buffers or [
            torch.empty(self._num_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)
        ]
        works, self._works[which] = self._works[which], []
        self._mesh.wait(works)
        return self._buffers[which]

    def push(self, which: int, num_bytes: int) -> None:
        """The bucket's own message carries its digest."""
        self._works[which] = self._mesh.send(
            [(self._receiver, self._buffers[which][:num_bytes])], digested=False
        )

    def drop(self) -> None:
        self._works = [[], []]
        self._mesh.drop()

    def close(self) -> None:
        self.drop()
        self._buffers = []


class MeshInbox:
    """The engine rank's end of a mesh."""

    KIND: ClassVar[str] = "mesh"

    def __init__(
        self,
        descriptions: Sequence[dict[str, Any]],
        faults: Faults,
        *,
        device: torch.device,
        deadline_seconds: float,
    ) -> None:
        self._description, self._faults = _checked(descriptions), faults
        self._device, self._seconds = device, deadline_seconds
        self.num_bytes = self._description["num_bytes"]
        self._mesh: Mesh | None = None
        self._buckets = [torch.empty(self.num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def is_for(self, descriptions: Sequence[dict[str, Any]]) -> bool:
        return self._mesh is not None and list(descriptions) == [self._description]

    def connect(self, lost: Lost) -> None:
        if self._mesh is None:
            d = self._description
            meeting = Meeting(d["host"], d["port"], d["token"], d["rank"], d["size"])
            self._mesh = Mesh(meeting, device=self._device, deadline_seconds=self._seconds, lost=lost)

    def take(self, which: int, num_bytes: int, parcels: Sequence[Parcel] | None = None) -> torch.Tensor:
        bucket = self._buckets[which][:num_bytes]
        if parcels is None:
            self._receive([(self._description["feeder"], bucket)], digested=False)
        else:
            self._receive(_split(bucket, parcels), digested=self._description["digests"])
        return bucket

    def _receive(self, expected: Sequence[tuple[int, torch.Tensor]], *, digested: bool) -> None:
        if self._mesh is None:
            raise WeightSyncError("a message before the session's ranks had met")
        receives, trailers = [], []
        for rank, data in expected:
            receives.append((rank, data))
            if digested:
                trailers.append(torch.empty(1, dtype=torch.int64, device=self._device))
                receives.append((rank, trailers[-1]))
        self._mesh.wait(self._mesh.start((), receives), "bytes of a bucket did not come")
        for _, data in expected:
            self._faults.arrived(data)
        for (rank, data), sent in zip(expected, trailers, strict=False):
            if not torch.equal(trailer(data), sent):
                raise WeightSyncError(
                    f"the {data.numel()} bytes received from trainer rank {rank} do not have the digest of those sent"
                )

    def drop(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    def close(self) -> None:
        self.drop()
        self._buckets = []


def _checked(descriptions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kinds = {
        "token": str, "host": str, "port": int, "rank": int, "size": int, "feeder": int, "digests": bool,
        "num_bytes": int, "kind": str,
    }  # fmt: skip
    (description,) = descriptions if len(descriptions) == 1 else ({},)
    if {k: type(v) for k, v in description.items()} != kinds or description["num_bytes"] <= 0:
        raise WeightSyncError(f"no description of a mesh: {list(descriptions)!r:.200}")
    return description


def _split(bucket: torch.Tensor, parcels: Sequence[Parcel]) -> list[tuple[int, torch.Tensor]]:
    """(rank, its bytes); parcels follow each other and fill the bucket."""
    pieces, end = [], 0
    for parcel in parcels:
        if parcel.offset != end:
            raise WeightSyncError(f"{parcel} should begin at byte {end} of its bucket")
        end += parcel.num_bytes
        pieces.append((parcel.rank, bucket[parcel.offset : end]))
    if end != bucket.numel():
        raise WeightSyncError(f"parcels of {end} bytes for a bucket of {bucket.numel()}")
    return pieces
