"""A receiver that is gone is left out of sessions, and another process takes its place by the same plan."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.models import TINY
from benchmarks.resharding.storage import Storage, Windows
from benchmarks.resharding.trainer import BenchTrainer
from mrl.errors import WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import Session
from tests.ranks import run_ranks
from tests.resharding.pools import HOST, SYNC, meet, store_of

CPU = torch.device("cpu")
RECEIVERS = 2
SESSIONS: list[tuple[int | None, int, tuple[int, ...]]] = [
    (-1, 0, ()),
    (0, 1, ()),  # receiver 1 breaks in it and is gone
    (None, 1, (1,)),
    (1, 2, (1,)),
    (None, 3, ()),  # another one in its place
    (3, 4, ()),
    (None, 4, (0,)),  # one alone, that has the version already
    (4, 5, ()),
]
"""From which version to which, and without whom."""
BREAKS, JOINS = 1, 4


def opened(number: int, digest: str) -> Session:
    start, end, _ = SESSIONS[number]
    return Session(f"{number:032x}", start, end, digest)


class Breaks(Windows):
    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        raise ValueError("this receiver ends here")


def train(rank: int, layout: Layout, transport: str, store: TCPStore, port: int) -> list[str]:
    trainer = BenchTrainer(TINY, layout, rank, device=CPU)
    sync = SYNC.model_copy(update={"transport": transport})
    addresses = [store.get(f"address{r}").decode() for r in range(RECEIVERS)]
    on_one = 8 if transport == "auto" else 1
    topology = Topology.separate(layout.world_size, RECEIVERS, slots_per_node=on_one)
    manifests = engine_manifests.engine_rank_manifests(TINY, Layout(tp=RECEIVERS))
    weight_sync = PlannedSync(
        trainer, sync, addresses, manifests, topology=topology, store=f"tcp://{HOST}:{port}"
    )
    store.set("digest", weight_sync.digest)
    errors = []
    for number, (_, version, absent) in enumerate(SESSIONS):
        if number == JOINS:
            weight_sync.redial({1: store.get("address-new").decode()})
        trainer.fill(version)
        try:
            weight_sync.send(opened(number, weight_sync.digest), absent)
        except WeightSyncError as error:
            errors.append(f"{number}: {error}")
    meet(store, layout.world_size + RECEIVERS, "sent")
    weight_sync.close()
    trainer.close()
    return errors


def generate(number: int, layout: Layout, transport: str, store: TCPStore) -> list[int]:
    storage = Storage(engine_manifests.engine_rank_manifests(TINY, Layout(tp=RECEIVERS))[number], CPU)
    host = None if transport == "auto" else HOST
    receiver = Receiver(deadline_seconds=SYNC.deadline_seconds, device=CPU, host=host)
    store.set(f"address{number}", receiver.address)
    digest, checkpoint, versions = store.get("digest").decode(), family_of(TINY).checkpoint_tensors(TINY), []
    for turn, (_, version, absent) in enumerate(SESSIONS):
        if number in absent:
            continue
        if number == 1 and turn == JOINS:
            receiver = Receiver(deadline_seconds=SYNC.deadline_seconds, device=CPU, host=host)
            store.set("address-new", receiver.address)
        storage.poison()
        ends = (turn, number) == (BREAKS, 1)
        try:
            receiver.receive(opened(turn, digest), Breaks(storage) if ends else Windows(storage))
            assert storage.first_difference(MadeUp(checkpoint, version=version)) is None
        except (WeightSyncError, ValueError):
            assert turn == BREAKS
        if ends:
            receiver.close()
        versions.append(receiver.progress.version)
    meet(store, layout.world_size + RECEIVERS, "sent")
    receiver.close()
    return versions


def one_process(rank: int, size: int, port: int, layout: Layout, transport: str) -> Any:
    with store_of(rank, layout.world_size, port) as store:
        if rank < layout.world_size:
            result: Any = train(rank, layout, transport, store, port)
        else:
            result = generate(rank - layout.world_size, layout, transport, store)
        if rank == 0:
            meet(store, size, "left")
        else:
            store.add("left", 1)
        return result


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "transport"),
    [
        (Layout(tp=2, ep=2), "auto"),
        (Layout(tp=2, ep=2), "distributed"),
        pytest.param(Layout(), "distributed", marks=pytest.mark.slow),
        pytest.param(Layout(), "nixl", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sessions_go_on_without_a_receiver_and_with_the_one_that_replaces_it(layout, transport) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    results = run_ranks(one_process, layout.world_size + RECEIVERS, layout, transport, seconds=240)
    for errors in results[: layout.world_size]:
        assert len(errors) == 1 and errors[0].startswith(f"{BREAKS}: ")
        assert "this receiver ends here" in errors[0]
    first, second = results[layout.world_size :]
    assert first == [0, 0, 1, 2, 3, 4, 5]
    assert second == [0, 0, 3, 4, 4, 5]
