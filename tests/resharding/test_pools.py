"""Weight syncs between real processes that share no memory, and over two pretended nodes that share it slot by slot."""

import datetime
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.models import TINY
from benchmarks.resharding.storage import Storage, Windows
from benchmarks.resharding.trainer import BenchTrainer
from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import ReceiverState, Session
from tests.ranks import run_ranks
from tests.resharding.pools import HOST, SYNC, meet, store_of

CPU = torch.device("cpu")


def session(number: int, digest: str, committed: int) -> Session:
    """The same on every process without anybody telling."""
    return Session(f"{number:032x}", committed, committed + 1, digest)


def train(
    rank: int, layout: Layout, sync: SyncSection, receivers: int, port: int, store: dist.TCPStore, size: int
) -> Any:
    trainer = BenchTrainer(TINY, layout, rank, device=CPU)
    addresses = [store.get(f"address{r}").decode() for r in range(receivers)]
    manifests = engine_manifests.engine_rank_manifests(TINY, Layout(tp=receivers))
    on_one = 8 if sync.transport == "auto" else 1  # machine: where memory can be shared
    topology = Topology.separate(layout.world_size, receivers, slots_per_node=on_one)
    planned = PlannedSync(
        trainer, sync, addresses, manifests, topology=topology, store=f"tcp://{HOST}:{port}"
    )
    names = [tensor.name for tensor in trainer.checkpoint]
    whole = PlannedSync(
        trainer,
        sync,
        addresses,
        [RankManifest.of(r, (), names) for r in range(receivers)],
        topology=topology,
        store=f"tcp://{HOST}:{port}",
    )
    store.set("planned", planned.digest)
    store.set("whole", whole.digest)
    sent, heard = [], ""
    for number, weight_sync in enumerate([planned, planned, planned, whole]):
        trainer.fill(number)
        try:
            sent.append(weight_sync.send(session(number, weight_sync.digest, len(sent) - 1)))
        except WeightSyncError as error:
            heard = str(error)
    meet(store, size, "sent")
    meet(store, size, "released")
    planned.close()
    whole.close()
    trainer.close()
    return [len(sent), heard, [s["cross_slot_bytes"] for s in sent[:2]], planned.plan.summary()]


def generate(number: int, receivers: int, store: dist.TCPStore, size: int, transport: str) -> Any:
    """Receiver `number`; the last one breaks in the middle of the second session."""
    storage = Storage(engine_manifests.engine_rank_manifests(TINY, Layout(tp=receivers))[number], CPU)
    host = None if transport == "auto" else HOST
    receiver = Receiver(deadline_seconds=SYNC.deadline_seconds, device=CPU, host=host)
    store.set(f"address{number}", receiver.address)
    digests = [store.get(name).decode() for name in ("planned", "whole")]
    errors, checkpoint = [], family_of(TINY).checkpoint_tensors(TINY)
    for attempt in range(4):
        storage.poison()
        windows = Broken(storage) if (attempt, number) == (1, receivers - 1) else Windows(storage)
        opened = session(attempt, digests[attempt == 3], receiver.progress.version)
        try:
            receiver.receive(opened, windows)
            difference = storage.first_difference(MadeUp(checkpoint, version=attempt))
            assert difference is None, difference
        except (WeightSyncError, ValueError) as error:
            assert receiver.progress.state is ReceiverState.FAILED
            errors.append(str(error))
    meet(store, size, "sent")
    receiver.close()
    meet(store, size, "released")
    return [receiver.progress.version, errors]


class Broken(Windows):
    """Raises in the middle."""

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        if index == min(2, len(self._tables.windows) - 1):
            raise ValueError(f"broken on purpose in window {index}")
        super().apply(index, sources, bucket)


def one_process(rank: int, size: int, port: int, layout: Layout, transport: str) -> Any:
    trainers, sync = layout.world_size, SYNC.model_copy(update={"transport": transport})
    with store_of(rank, trainers, port) as store:
        if rank < trainers:
            result = train(rank, layout, sync, size - trainers, port, store, size)
        else:
            result = generate(rank - trainers, size - trainers, store, size, transport)
        if rank == 0:  # whose store it is: the others must have read it for the last time
            meet(store, size, "left")
        else:
            store.add("left", 1)
        return result


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "receivers", "transport"),
    [
        pytest.param(Layout(), 2, "auto", marks=pytest.mark.slow),
        (Layout(tp=2, ep=2), 1, "auto"),
        (Layout(), 2, "distributed"),
        (Layout(pp=2), 1, "distributed"),
        (Layout(tp=2, ep=2), 2, "distributed"),
        (Layout(pp=2), 1, "nixl"),
        (Layout(tp=2, ep=2), 2, "nixl"),
    ],
    ids=str,
)
def test_separate_pools_get_every_byte_and_one_receivers_error_stops_all(
    layout: Layout, receivers: int, transport: str
) -> None:
    """By boxes twice around a broken session, then by whole tensors: as many receivers as trainers, fewer, and more."""
    results = run_ranks(one_process, layout.world_size + receivers, layout, transport, seconds=240)
    summary = results[0][3]
    assert summary["bytes_local"] == 0
    assert summary["bytes_needed"] == summary["lower_bound_cross_slot_bytes"]
    broken = f"broken on purpose in window {min(2, summary['windows'] - 1)}"
    for sent, heard, _, _ in results[: layout.world_size]:
        assert sent == 3 and broken in heard
    assert sum(r[2][0] for r in results[: layout.world_size]) == summary["bytes_needed"]
    for version, errors in results[layout.world_size :]:
        assert version == 2 and len(errors) == 1
    assert broken in results[-1][1][0]


# -- two pretended nodes ------------------------------------------------------------------------------------------


def one_slot(rank: int, size: int, port: int, layout: Layout, slots_per_node: int) -> Any:
    """Both ends of a slot; what comes from ranks of the other node is counted where it arrives."""
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    counted = {"intra": 0, "inter": 0}
    exchange = RankGroup.exchange

    def counting(self: RankGroup, sends: Any, receives: Any) -> list[Any]:
        for peer, data in receives:
            if data.dtype == torch.uint8:  # weights; digests of 8 bytes come after them
                node = "intra" if peer // slots_per_node == rank // slots_per_node else "inter"
                counted[node] += data.numel()
        return exchange(self, sends, receives)

    RankGroup.exchange = counting  # type: ignore[method-assign]
    trainer = BenchTrainer(TINY, layout, rank, device=CPU)
    manifests = engine_manifests.engine_rank_manifests(TINY, Layout(tp=2, dp=size // 2))
    storage = Storage(manifests[rank], CPU)
    receiver = Receiver(deadline_seconds=60.0, device=CPU)
    addresses: list[Any] = [None] * size
    dist.all_gather_object(addresses, receiver.address)
    sync = SYNC.model_copy(update={"transport": "auto"})
    topology = Topology.shared(size, slots_per_node=slots_per_node)
    weight_sync = PlannedSync(trainer, sync, addresses, manifests, topology=topology)
    trainer.fill(0)
    opened = session(0, weight_sync.digest, -1)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            receiver.receive(opened, Windows(storage))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    weight_sync.send(opened)
    thread.join(60)
    assert not errors, errors
    difference = storage.first_difference(MadeUp(trainer.checkpoint, version=0))
    receiver.close()
    weight_sync.close()
    trainer.close()
    dist.destroy_process_group()
    return [difference, counted, weight_sync.plan.summary()]


@pytest.mark.integration
@pytest.mark.parametrize(("layout", "slots_per_node"), [(Layout(pp=2), 1), (Layout(tp=2, pp=2), 2)], ids=str)
def test_the_peer_lane_crosses_two_nodes_with_the_plans_bytes(layout: Layout, slots_per_node: int) -> None:
    results = run_ranks(one_slot, layout.world_size, layout, slots_per_node, seconds=200)
    summary = results[0][2]
    assert [r[0] for r in results] == [None] * layout.world_size
    assert summary["nodes"] == 2
    assert sum(r[1]["inter"] for r in results) == summary["bytes_inter_node"] > 0
    assert sum(r[1]["intra"] for r in results) == summary["bytes_intra_node"]
