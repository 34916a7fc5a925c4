"""The ranks of a weight sync joined by NIXL agents: trainer ranks write straight into the receivers' buckets.

Same interface as `mesh.Mesh`. Ranks meet through the trainers' store, where every receiver publishes the
addresses of its buckets. A write brings a note with its number and digest, so the receiver knows what came
from whom. The session controls writing: a bucket is free once all trainer ranks agreed on its window. UCX
carries the bytes: sockets and shared memory between processes, InfiniBand or RoCE between machines' GPUs (not
yet run).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire import memory
from mrl.resharding.wire.channel import Lost
from mrl.resharding.wire.digest import digest_bytes
from mrl.resharding.wire.meeting import Meeting, published_by
from mrl.resharding.wire.mesh import MessageLost, Outgoing

_POLL_SECONDS = 0.0005
_PROBE_SECONDS = 0.1
"""How often a waiting rank checks that its peer still exists."""


def nixl() -> Any:
    """Return NIXL's Python interface; raise WeightSyncError if it is not installed."""
    try:
        from nixl_cu13 import _api  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise WeightSyncError(
            f"sync.transport = nixl needs NVIDIA's NIXL ({error}); install it with: pip install mrl[nixl]"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


class NixlMesh:
    """Agent of one rank among all ranks of a weight sync."""

    def __init__(
        self,
        meeting: Meeting,
        *,
        device: torch.device,
        deadline_seconds: float,
        lost: Lost,
        buckets: Sequence[torch.Tensor] = (),
    ) -> None:
        """Join all ranks. `buckets`: a receiver's, which trainer ranks write into."""
        self.lost = lost
        """Return why this rank's peer of the open session can never answer, or None."""
        self._device, self._seconds, self._meeting = device, deadline_seconds, meeting
        api = nixl()
        self._agent: Any = api.nixl_agent(
            _agent_name(meeting, meeting.rank), api.nixl_agent_config(backends=["UCX"])
        )
        self._registered: dict[int, tuple[Any, torch.UntypedStorage]] = {}
        places = [self._register(bucket) for bucket in buckets]
        card = json.dumps({"agent": self._agent.get_agent_metadata().hex(), "buckets": places})
        try:
            self._store = meeting.meet(deadline_seconds, lost, message=card)
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(f"rank {meeting.rank} of {meeting.size} could not join: {error}") from error
        self._peers: dict[int, tuple[str, list[tuple[int, int, int]]]] = {}
        self._sent: Counter[int] = Counter()
        self._taken: Counter[int] = Counter()
        self._notes: dict[tuple[str, int], int] = {}

    def send(self, messages: Sequence[Outgoing]) -> list[Any]:
        """Start the writes; keep the data unchanged until `wait` returns."""
        memory.synchronize(self._device)  # the network card reads what the device writes
        return [self._write(m, digest_bytes(m.data)) for m in messages]

    def _write(self, message: Outgoing, digest: int) -> Any:
        try:
            name, buckets = self._peer(message.rank)
        except Exception as error:  # NIXL's errors have no common base
            return error
        address, size, number = buckets[message.bucket]
        data = message.data
        if message.offset + data.numel() > size:
            raise WeightSyncError(
                f"{data.numel()} bytes at offset {message.offset} exceed a bucket of {size} bytes"
            )
        self._sent[message.rank] += 1
        note = f"{self._sent[message.rank]} {digest}".encode()
        local = self._descriptors([self._register(data)])
        remote = self._descriptors([(address + message.offset, data.numel(), number)])
        try:
            work = self._agent.initialize_xfer("WRITE", local, remote, name, note)
            self._agent.transfer(work)
        except Exception as error:
            return error
        return work

    def flush(self, works: Sequence[Any]) -> None:
        """Wait until the receivers can see the writes: a note leaves when its write is seen to be done."""
        self.wait(works, "messages were not taken")

    def wait(self, works: Sequence[Any], failure: str) -> None:
        """Wait until everything is written; raise MessageLost if a peer is gone."""
        for work in works:
            self._until(lambda work=work: self._written(work, failure), failure)

    def _written(self, work: Any, failure: str) -> bool:
        try:
            state = "ERR" if isinstance(work, Exception) else self._agent.check_xfer_state(work)
        except Exception as error:
            raise MessageLost(f"{failure}: {error!r}") from error
        if state == "ERR":
            raise MessageLost(f"{failure}: {work!r}")
        return state == "DONE"

    def receive(self, parcels: Sequence[tuple[int, torch.Tensor]]) -> list[int]:
        """Wait until each rank's next bytes are in this rank's bucket; return their digests."""
        expected = []
        for rank, _ in parcels:
            self._taken[rank] += 1
            expected.append((_agent_name(self._meeting, rank), self._taken[rank]))
        self._until(lambda: self._all_arrived(expected), "bytes of a bucket did not come")
        return [self._notes.pop(key) for key in expected]

    def _all_arrived(self, expected: Sequence[tuple[str, int]]) -> bool:
        for name, notes in self._agent.get_new_notifs().items():
            for note in notes:
                number, digest = map(int, note.split())
                self._notes[name, number] = digest
        return all(key in self._notes for key in expected)

    def _until(self, done: Any, failure: str) -> None:
        deadline, probed = time.monotonic() + self._seconds, time.monotonic()
        while not done():
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if now - probed > _PROBE_SECONDS:
                probed, reason = now, self.lost()
                if reason is not None:
                    raise MessageLost(f"{failure}: {reason}")
            if now > deadline:
                raise MessageLost(f"{failure} within {self._seconds} s")

    def _peer(self, rank: int) -> tuple[str, list[tuple[int, int, int]]]:
        """Return a receiver's (agent, buckets as (address, bytes, device))."""
        if rank not in self._peers:
            card = json.loads(published_by(self._store, rank))
            name = self._agent.add_remote_agent(bytes.fromhex(card["agent"]))
            name = name.decode() if isinstance(name, bytes) else name
            self._peers[rank] = (name, [(a, n, d) for a, n, d in card["buckets"]])
        return self._peers[rank]

    def _register(self, data: torch.Tensor) -> tuple[int, int, int]:
        """Return the data's (address, bytes, device); register its storage once, until `close`."""
        storage, number = data.untyped_storage(), max(data.get_device(), 0)
        if storage.data_ptr() not in self._registered:
            region = [(storage.data_ptr(), storage.nbytes(), number, "")]
            registered = self._agent.register_memory(region, self._kind, backends=["UCX"])
            self._registered[storage.data_ptr()] = (registered, storage)
        return data.data_ptr(), data.numel(), number

    def _descriptors(self, places: Sequence[tuple[int, int, int]]) -> Any:
        return self._agent.get_xfer_descs(list(places), self._kind)

    @property
    def _kind(self) -> str:
        return "VRAM" if self._device.type == "cuda" else "DRAM"

    def close(self) -> None:
        """Deregister the memory; writes in flight no longer reach it."""
        for registered, _ in self._registered.values():
            self._agent.deregister_memory(registered, backends=["UCX"])
        self._registered.clear()
        self._agent = None


def _agent_name(meeting: Meeting, rank: int) -> str:
    return f"{meeting.token}-{rank}"
