"""NIXL agents of one process: writes arrive in place, in order, with their digest; lost peers are noticed."""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.digest import digest_bytes
from mrl.resharding.wire.meeting import Meeting
from mrl.resharding.wire.mesh import MessageLost, Outgoing
from mrl.resharding.wire.nixl_mesh import NixlMesh, nixl
from tests.resharding.wires import store

CPU = torch.device("cpu")


def alive() -> None:
    return None


class Pair:
    """A trainer rank and a receiver with two buckets of 1,024 bytes."""

    def __init__(self, token: str) -> None:
        self._store = store()
        self.buckets = [torch.zeros(1024, dtype=torch.uint8) for _ in range(2)]
        came: list[NixlMesh] = []

        def come() -> None:
            came.append(self._join(token, 1, self.buckets))

        thread = threading.Thread(target=come)
        thread.start()
        self.sender = self._join(token, 0, ())
        thread.join(60)
        (self.receiver,) = came

    def _join(self, token: str, rank: int, buckets: Any) -> NixlMesh:
        meeting = Meeting(f"tcp://127.0.0.1:{self._store.port}", token, rank, 2)
        return NixlMesh(meeting, device=CPU, deadline_seconds=60.0, lost=alive, buckets=buckets)

    def write(self, value: int, size: int, bucket: int, offset: int) -> torch.Tensor:
        data = torch.full((size,), value, dtype=torch.uint8)
        self.sender.flush(self.sender.send([Outgoing(1, data, bucket=bucket, offset=offset)]))
        return data

    def take(self, size: int) -> list[int]:
        return self.receiver.receive([(0, self.buckets[0][:size])])


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair("pair")
    yield made
    made.sender.close()
    made.receiver.close()


def test_writes_land_where_they_were_meant_and_are_told_in_order(pair: Pair) -> None:
    first, second = pair.write(7, 100, 1, 900), pair.write(9, 24, 1, 1000)
    assert pair.take(100) == [digest_bytes(first)] and pair.take(24) == [digest_bytes(second)]
    assert pair.buckets[1].tolist() == [0] * 900 + [7] * 100 + [9] * 24 and not pair.buckets[0].any()
    pair.write(5, 1024, 0, 0)
    pair.take(1024)
    assert pair.buckets[0].tolist() == [5] * 1024


def test_a_write_that_would_leave_the_bucket_is_refused(pair: Pair) -> None:
    with pytest.raises(WeightSyncError, match="25 bytes at offset 1000 exceed a bucket of 1024"):
        pair.write(7, 25, 0, 1000)
    assert not pair.buckets[0].any()


def test_a_receiver_that_waits_ends_when_its_peer_is_gone(pair: Pair) -> None:
    pair.receiver.lost = lambda: "process 7 ended"
    started = time.monotonic()
    with pytest.raises(MessageLost, match="bytes of a bucket did not come: process 7 ended"):
        pair.take(8)
    assert time.monotonic() - started < 30


def test_a_write_to_an_agent_that_was_gone_before_the_first_is_lost() -> None:
    pair = Pair("gone")
    pair.receiver.close()
    with pytest.raises(MessageLost, match="messages were not taken"):
        pair.write(1, 8, 0, 0)
    pair.sender.close()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    with pytest.raises(WeightSyncError, match=r"sync.transport = nixl needs .* pip install mrl\[nixl\]"):
        nixl()
