"""A trainer rank and a receiver for the contract tests: failing consumer, whole sessions, a death."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.resharding.storage import Storage, StorageConsumer
from mrl.config.sections.sync import SyncSection
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.agreement import as_one_rank
from mrl.resharding.planner.cells import PlanCells
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan, PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.proof import EngineProof, TrainerProof
from mrl.resharding.transfer.receiver import Consumer, Receiver
from mrl.resharding.transfer.run_session import ReceiverFeed, SentSession
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import Tables, tables_of
from mrl.resharding.transfer.transports import MeshTransport, bucket_messages_of
from mrl.resharding.wire.mesh_link import MeshLink
from tests.gpu.one_rank import OneRankLane

SYNC = SyncSection(bucket_bytes=1024, deadline_seconds=30.0)


class Shelf(StorageConsumer):
    """Stores tensors that come whole, fails on request, and has no parameters of its own."""

    def __init__(self, fail_at: str | None = None, action: Callable[[], Any] | None = None) -> None:
        super().__init__(Storage(RankManifest.of(0, ()), torch.device("cpu")))
        self.tensors: dict[str, torch.Tensor] = {}
        self.aborts = 0
        self._fail_at, self._action = fail_at, action

    def start(self, tables: Tables, proof: EngineProof | None) -> None:
        self._reach("start")
        super().start(tables, proof)

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self.tensors
        self._reach(name)
        self.tensors[name] = tensor

    def finish(self) -> None:
        self._reach("finish")

    def abort(self) -> None:
        self.aborts += 1
        self.tensors.clear()

    def _reach(self, point: str) -> None:
        if point == self._fail_at:
            assert self._action is not None
            self._action()


def model(
    seed: int = 0, sizes: tuple[int, ...] = (256, 257, 900, 3, 1, 64, 5000)
) -> tuple[Plan, list[torch.Tensor]]:
    """Return float tensors t0, t1, ..., among them one bucket, one element more, and far more."""
    torch.manual_seed(seed)
    values = [torch.randn(size) for size in sizes]
    return whole_plan({f"t{i}": value for i, value in enumerate(values)}), values


def whole_plan(weights: Mapping[str, torch.Tensor]) -> Plan:
    """Return a plan in which one rank has everything and another, without overlap, takes it whole."""
    return build_plan(
        [holder_of(weights)],
        [RankManifest.of(0, (), weights)],
        Topology.separate_slots([0]),
        PlanOptions(bucket_bytes=SYNC.bucket_bytes),
    )


def holder_of(weights: Mapping[str, torch.Tensor]) -> RankManifest:
    rows = ((name, tuple(w.shape), str(w.dtype).removeprefix("torch.")) for name, w in weights.items())
    return as_one_rank(CheckpointTensor(*row) for row in rows)


def proof_of(plan: Plan) -> TrainerProof:
    return TrainerProof(PlanCells(plan), 0, plan.trainers[0].tensors, [0])


def receiver_tables(plan: Plan) -> Tables:
    return tables_of(plan.part(1), (), list(proof_of(plan).needed[0].values()))


def announce(sender: WeightSender, session: Session, plan: Plan) -> None:
    """Open a session; return when the receiver has its tables."""
    tables = receiver_tables(plan)
    sender.announce(session, tables)
    sender.accepted(tables)


def send(
    sender: WeightSender,
    session: Session,
    plan: Plan,
    values: Sequence[torch.Tensor],
    seconds: float = 30.0,
    *,
    others: Sequence[WeightSender] = (),
) -> dict[str, float]:
    """Send as the only trainer rank. `others`: further senders, informed of the session first."""
    in_flight = opened(sender, session, plan, values, seconds, others=others)
    in_flight.send()
    return in_flight.commit()


def opened(
    sender: WeightSender,
    session: Session,
    plan: Plan,
    values: Sequence[torch.Tensor],
    seconds: float = 30.0,
    *,
    others: Sequence[WeightSender] = (),
) -> SentSession:
    """Return a session of the only trainer rank, before it is sent."""
    part, ranks = plan.part(0), RankGroup(None, seconds, torch.device("cpu"))
    mesh, parcels, lane = None, None, OneRankLane(part, torch.device("cpu"))
    if isinstance(sender._link, MeshLink):
        mesh, parcels = sender._link._mesh, bucket_messages_of(plan.part(1), {0: 0})
        lane = MeshTransport(mesh, part, {1: 0}, [{1: 0} for _ in part.windows])
    feeds = [ReceiverFeed(each_sender, receiver_tables(plan), parcels) for each_sender in (*others, sender)]
    return SentSession(feeds, session, part, values, lane, ranks, proof_of(plan), mesh=mesh)


class Receiving(threading.Thread):
    def __init__(self, receiver: Receiver, session: Session, consumer: Consumer) -> None:
        super().__init__(daemon=True)
        self._call = lambda: receiver.receive(session, consumer)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def end(self, seconds: float = 45.0) -> BaseException | None:
        self.join(seconds)
        assert not self.is_alive(), "the receiver did not return"
        return self.error


def exchange(
    sender: WeightSender, receiver: Receiver, plan: Plan, values: list[torch.Tensor], version: int
) -> Shelf:
    shelf, session = Shelf(), Session.new(receiver.progress.version, version, plan.digest)
    thread = Receiving(receiver, session, shelf)
    stats = send(sender, session, plan, values)
    assert thread.end() is None and stats["bytes"] == sum(v.nbytes for v in values)
    assert receiver.progress.serving and receiver.progress.version == version
    assert len(shelf.tensors) == len(values)
    assert all(torch.equal(shelf.tensors[f"t{i}"], value) for i, value in enumerate(values))
    return shelf


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
