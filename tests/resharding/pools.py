"""Processes of two resource pools, trainer ranks and receivers, that run a script of sessions."""

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.models import TINY
from benchmarks.resharding.storage import Storage, StorageConsumer
from benchmarks.resharding.trainer import BenchTrainer
from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import ReceiverState, Session

CPU = torch.device("cpu")
HOST = "127.0.0.1"
SYNC = SyncSection(bucket_bytes=64 << 10, deadline_seconds=60.0, transport="distributed")


@dataclasses.dataclass(frozen=True)
class Step:
    """One session: its versions and its faults."""

    start: int | None
    end: int
    absent: tuple[int, ...] = ()
    """Receivers that are left out."""
    whole: bool = False
    breaks: bool = False
    """The last receiver raises midway; it ends if the next session omits it."""
    content: int | None = None
    """Number of the made-up weights; None: the version's."""
    joins: bool = False
    """Another process replaced the last receiver before the session."""


Script = Sequence[Step]


class Broken(StorageConsumer):
    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        if index == min(2, len(self._tables.windows) - 1):
            raise ValueError(f"broken on purpose in window {index}")
        super().apply(index, sources, bucket)


def one_process(
    rank: int,
    size: int,
    port: int,
    layout: Layout,
    transport: str,
    script: Script,
    together: bool = False,
    delta: str = "off",
    overlap: str = "off",
) -> Any:
    """Run a process of `run_ranks`: trainer ranks first, then receivers, with `together` on one node. With
    `overlap` on, receivers take each session before they load it."""
    trainers = layout.world_size
    with store_of(rank, trainers, port) as store:
        if rank < trainers:
            sync = SYNC.model_copy(update={"transport": transport, "delta": delta, "overlap": overlap})
            end = train(rank, layout, sync, script, size - trainers, store, port, together)
        else:
            end = generate(rank - trainers, size - trainers, transport, script, store, ahead=overlap == "on")
        meet(store, size, "sent")
        result = end() if rank >= trainers else None
        meet(store, size, "released")  # before buffers are freed, which receivers have mapped
        result = end() if rank < trainers else result
        if rank == 0:  # whose store it is: the others must have read it for the last time
            meet(store, size, "left")
        else:
            store.add("left", 1)
        return result


def train(
    rank: int,
    layout: Layout,
    sync: SyncSection,
    script: Script,
    receivers: int,
    store: dist.TCPStore,
    port: int,
    together: bool,
) -> Any:
    """Run a trainer rank; return (sessions' figures, errors of failed sessions, the plan's summary)."""
    trainer = BenchTrainer(TINY, layout, rank, device=CPU)
    addresses = [store.get(f"address{r}").decode() for r in range(receivers)]
    slots = range(layout.world_size + receivers)
    nodes = [0 if sync.transport == "auto" else slot for slot in slots]  # of one node: memory can be shared
    if together:
        nodes[layout.world_size :] = [layout.world_size] * receivers
    topology = Topology.separate_pools(nodes, num_trainers=layout.world_size)
    by_boxes = engine_manifests.engine_rank_manifests(TINY, Layout(tp=receivers))
    names = [tensor.name for tensor in trainer.checkpoint]
    syncs = [
        PlannedSync(trainer, sync, addresses, manifests, topology=topology, store=f"tcp://{HOST}:{port}")
        for manifests in (by_boxes, [RankManifest.of(r, (), names) for r in range(receivers)])
    ]
    store.set("digests", " ".join(weight_sync.digest for weight_sync in syncs))
    figures, errors = [], {}
    for number, step in enumerate(script):
        weight_sync = syncs[step.whole]
        if step.joins:
            weight_sync.redial({receivers - 1: store.get("address-new").decode()})
        trainer.fill(step.end if step.content is None else step.content)
        session = opened(number, step, weight_sync.digest)
        try:
            if sync.overlap == "on":
                weight_sync.send_ahead(session, step.absent)
                trainer.fill(-1)
                store.set(f"taken{number}", "")
                figures.append(weight_sync.commit())
            else:
                figures.append(weight_sync.send(session, step.absent))
        except WeightSyncError as error:
            errors[number] = str(error)

    def end() -> Any:
        for weight_sync in syncs:
            weight_sync.close()
        trainer.close()
        return figures, errors, syncs[0].plan.summary()

    return end


def generate(
    number: int, receivers: int, transport: str, script: Script, store: dist.TCPStore, *, ahead: bool
) -> Any:
    """Run a receiver; return (versions after each of its sessions, errors of failed ones)."""
    storage = Storage(engine_manifests.engine_rank_manifests(TINY, Layout(tp=receivers))[number], CPU)
    host, last = None if transport == "auto" else HOST, number == receivers - 1

    def begin(name: str) -> Receiver:
        receiver = Receiver(deadline_seconds=SYNC.deadline_seconds, device=CPU, host=host)
        store.set(name, receiver.address)
        return receiver

    receiver = begin(f"address{number}")
    digests, checkpoint = store.get("digests").decode().split(), family_of(TINY).checkpoint_tensors(TINY)
    versions, errors = [], []
    for turn, step in enumerate(script):
        if number in step.absent:
            continue
        if step.joins and last:
            receiver = begin("address-new")
        session = opened(turn, step, digests[step.whole])
        if ahead:
            was_serving = receiver.progress.serving
            receiver.stage(session)
            store.wait([f"taken{turn}"])
            assert receiver.progress.serving is was_serving
        storage.poison()
        windows = Broken(storage) if step.breaks and last else StorageConsumer(storage)
        try:
            receiver.receive(session, windows)
            content = step.end if step.content is None else step.content
            assert storage.first_difference(MadeUp(checkpoint, version=content)) is None
        except (WeightSyncError, ValueError) as error:
            assert step.breaks and receiver.progress.state is ReceiverState.FAILED
            errors.append(str(error))
            if number in script[turn + 1].absent:
                receiver.close()
        versions.append(receiver.progress.version)

    def end() -> Any:
        receiver.close()
        return versions, errors

    return end


def opened(number: int, step: Step, digest: str) -> Session:
    """Return the session, which every process derives alike."""
    return Session(f"{number:032x}", step.start, step.end, digest)


@contextlib.contextmanager
def store_of(rank: int, trainers: int, port: int) -> Iterator[dist.TCPStore]:
    """Return a client of the trainers' store, which rank 0 hosts."""
    if rank < trainers and trainers > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{HOST}:{port}",
            rank=rank,
            world_size=trainers,
            timeout=datetime.timedelta(seconds=90),
        )
    hosts = rank == 0 and trainers == 1
    wait = datetime.timedelta(seconds=90)
    yield dist.TCPStore(HOST, port, is_master=hosts, wait_for_workers=False, timeout=wait)
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(store: dist.TCPStore, size: int, name: str) -> None:
    store.add(name, 1)
    deadline = time.monotonic() + 90
    while store.add(name, 0) < size:
        assert time.monotonic() < deadline, f"not all processes came to {name}"
        time.sleep(0.02)
