"""Planned weight syncs between real processes: every slot ends with exactly the bytes its manifest names, or all raise."""

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.models import TINY
from benchmarks.resharding.storage import Storage, Windows
from benchmarks.resharding.trainer import BenchTrainer
from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer import receiver as receiver_module
from mrl.resharding.transfer.lease import Lease, describe_files, renewed
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import ReceiverState, Session
from mrl.resharding.transfer.slot_tables import Tables, of_part
from mrl.resharding.wire.faults import Faults
from mrl.resharding.wire.messages import Message
from mrl.resharding.wire.shared_memory import SharedSegment
from mrl.training.platform.parameter_memory import _free_pages
from tests.ranks import Rank, run_ranks
from tests.resharding.exchanges import Receiving, kill_self
from tests.resharding.footprint import Footprint, require_no_leak
from tests.resharding.leasing import LeasedRank
from tests.resharding.planned import (
    SHAPES,
    SYNC,
    Parameters,
    as_torch,
    equal,
    one_rank,
    plan_of,
    world_of,
)
from tests.resharding.wires import KINDS, MESHES, Wire, store
from tests.resharding.worlds import checkpoint, loaded

CPU = torch.device("cpu")


def test_one_slot_copies_everything_from_leased_memory() -> None:
    assert one_rank(0, 1, 0, "one", None) == [0, True, [], 0]


@pytest.mark.integration
@pytest.mark.parametrize("name", ["tp2-ep2", "pp2", "tp2-pp2", "ep2-dp2", "cp2-ep2"])
def test_every_slot_ends_with_its_manifests_bytes(name: str) -> None:
    size = SHAPES[name][0].world_size
    results = run_ranks(one_rank, size, name, None, seconds=240)
    assert [r[:3] for r in results] == [[0, True, []]] * size
    assert sum(r[3] for r in results) >= plan_of(world_of(name)).summary()["lower_bound_cross_slot_bytes"] > 0


@pytest.mark.integration
def test_one_slots_error_is_raised_by_every_rank_and_a_resend_heals() -> None:
    for rank, (version, same, outcome, _) in enumerate(run_ranks(one_rank, 2, "pp2", 1, seconds=240)):
        assert (version, same) == (0, True)
        assert sorted(o.split(":")[0] for o in outcome) == ["receiver", "sender"]
        assert all("broke on purpose" in o for o in outcome), f"rank {rank}: {outcome}"


# -- one slot, in this process ------------------------------------------------------------------------------------


@pytest.fixture
def slot():
    world = world_of("one")
    plan = plan_of(world)
    receiver = Receiver(deadline_seconds=30.0, device=torch.device("cpu"))
    sender = WeightSender(receiver.address, SYNC)
    trainer = LeasedRank(
        world.trainers[0].tensors, [as_torch(a) for a in loaded(world.trainers[0], checkpoint(world))]
    )
    yield world, plan, receiver, sender, trainer
    receiver.close()
    sender.close()
    trainer.close()


def test_after_an_error_the_lease_is_over_and_a_resend_heals(slot: Any) -> None:
    world, plan, receiver, sender, trainer = slot
    consumer, session = Parameters(world.engines[0], 0), Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, consumer)
    with pytest.raises(WeightSyncError, match="window 0 broke on purpose"):
        trainer.send(sender, session, plan, 0, group=None)
    assert isinstance(thread.end(), ValueError) and consumer.aborts == 1
    assert receiver.progress.state is ReceiverState.FAILED and receiver._lease is None
    for version in range(2):
        consumer, session = Parameters(world.engines[0]), Session.new(version - 1, version, plan.digest)
        thread = Receiving(receiver, session, consumer)
        trainer.send(sender, session, plan, 0, group=None)
        assert thread.end() is None and equal(consumer, world, 0)


@pytest.mark.parametrize("sessions", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_lease_is_given_back_over_many_sessions(slot: Any, sessions: int) -> None:
    world, plan, receiver, sender, trainer = slot
    marks = []
    for version in range(11 + sessions):
        if version >= 10 and (version - 10) % (sessions // 4) == 0:
            marks.append(Footprint.now())
        session, consumer = Session.new(version - 1, version, plan.digest), Parameters(world.engines[0])
        thread = Receiving(receiver, session, consumer)
        trainer.send(sender, session, plan, 0, group=None)
        assert thread.end() is None
    require_no_leak(marks)


def test_a_plan_from_another_layout_is_refused_before_any_byte_moves(slot, monkeypatch) -> None:
    """The engine was told the digest of its own layout's plan; nothing is mapped, started or copied for another one."""
    world, plan, receiver, sender, trainer = slot
    other = build_plan(
        world.trainers, world.engines, world.topology, PlanOptions(bucket_bytes=SYNC.bucket_bytes * 2)
    )
    mapped: list[Any] = []
    monkeypatch.setattr(receiver_module, "renewed", lambda old, lease: mapped.append(lease))
    monkeypatch.setattr(receiver_module, "open_inbox", lambda *_, **__: mapped.append("buffers"))
    consumer = Parameters(world.engines[0])
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, consumer)
    with pytest.raises(WeightSyncError, match=f"digest {other.digest[:12]}.*expected .* {plan.digest[:12]}"):
        trainer.send(sender, dataclasses.replace(session, digest=other.digest), other, 0, group=None)
    assert isinstance(thread.end(), WeightSyncError)
    assert not mapped and not consumer.flat and receiver.progress.version == -1
    monkeypatch.undo()
    _exchange(slot, Session.new(-1, 0, plan.digest))


def test_a_lease_of_an_earlier_session_is_refused_before_it_is_opened(slot, monkeypatch) -> None:
    """A sender that repeats an old session with its old description, while the receiver waits for the next one."""
    world, plan, receiver, sender, trainer = slot
    old = Session.new(-1, 0, plan.digest)
    _exchange(slot, old)
    opened: list[Any] = []
    monkeypatch.setattr(
        receiver_module, "renewed", lambda old, lease: opened.append(lease) or renewed(old, lease)
    )
    stale = WeightSender(receiver.address, SYNC)
    session, consumer = Session.new(0, 1, plan.digest), Parameters(world.engines[0])
    thread = Receiving(receiver, session, consumer)
    with pytest.raises(WeightSyncError, match="refused: this receiver waits for"):
        trainer.send(stale, old, plan, 0, group=None)
    assert not opened
    trainer.send(sender, session, plan, 0, group=None)
    assert thread.end() is None and len(opened) == 1
    stale.close()


def test_leased_memory_that_was_freed_or_is_anothers_cannot_be_opened(slot: Any) -> None:
    segment = SharedSegment(4096)
    (description,) = describe_files([(segment.export()["fd"], 4096)])
    Lease([description]).close()
    for wrong in ({"start_ticks": 1}, {"num_bytes": 8192}, {"inode": 1}, {"fd": 10_000}):
        with pytest.raises(WeightSyncError):
            Lease([description | wrong])
    segment.close()
    with pytest.raises(WeightSyncError):
        Lease([description])


def test_leased_files_stay_mapped_show_what_is_written_later_and_hold_no_memory() -> None:
    """A session after the first one reads through the same mapping; what the owner frees is free although it is mapped."""
    segments = [SharedSegment(1 << 20) for _ in range(2)]
    (one,), (other,) = (describe_files([(s.export()["fd"], 1 << 20)]) for s in segments)
    lease = renewed(None, [one])
    for value in (3, 7):
        segments[0].buffer.fill_(value)
        assert renewed(lease, [one]) is lease and (lease.buffers[0] == value).all()
    _free_pages(one["fd"])
    assert os.fstat(one["fd"]).st_blocks == 0
    newer = renewed(lease, [other])
    assert newer is not lease and not lease.buffers
    newer.close()
    for segment in segments:
        segment.close()


def _exchange(slot: Any, session: Session) -> None:
    """A whole session that must succeed."""
    world, plan, receiver, sender, trainer = slot
    consumer = Parameters(world.engines[0])
    thread = Receiving(receiver, session, consumer)
    trainer.send(sender, session, plan, 0, group=None)
    assert thread.end() is None and equal(consumer, world, 0)


class Slow(Parameters):
    """Takes no window before it may."""

    def __init__(self, manifest: RankManifest) -> None:
        super().__init__(manifest)
        self.begun, self.may = threading.Event(), threading.Event()

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        self.begun.set()
        assert self.may.wait(60)
        super().apply(index, sources, bucket)


def _lent_at_once(slot: Any, consumer: Parameters, tables: Tables) -> Receiving:
    """A receiver that was told of a session whose every byte lies in leased memory."""
    _, plan, receiver, sender, trainer = slot
    session = Session.new(-1, 0, plan.digest, full=False)
    thread = Receiving(receiver, session, consumer)
    lease = describe_files([(trainer.segment.export()["fd"], trainer.segment.buffer.numel())])
    sender.announce(session, tables, lease=lease, at_once=True)
    sender.accepted(tables)
    return thread


def test_a_receiver_that_was_lent_everything_begins_and_waits_for_no_word(slot: Any) -> None:
    """Only the end is waited for: whether all ranks got so far is agreed upon behind the copies."""
    world, plan, receiver, sender, trainer = slot
    consumer = Slow(world.engines[0])
    thread = _lent_at_once(slot, consumer, of_part(plan.part(0), trainer.leased))
    assert consumer.begun.wait(60) and receiver.progress.state is ReceiverState.RECEIVING
    consumer.may.set()
    sender.finish()
    assert equal(consumer, world, 0)
    sender.commit()
    assert thread.end() is None and receiver.progress.serving


def test_a_sender_that_gives_up_is_heard_after_what_is_being_copied(slot: Any) -> None:
    world, plan, receiver, sender, trainer = slot
    consumer = Slow(world.engines[0])
    thread = _lent_at_once(slot, consumer, of_part(plan.part(0), trainer.leased))
    assert consumer.begun.wait(60)
    sender.abort("another rank broke")
    consumer.may.set()
    assert "another rank broke" in str(thread.end()) and receiver.progress.state is ReceiverState.FAILED
    assert consumer.aborts == 1 and receiver._lease is None


def test_windows_that_bring_bytes_are_not_taken_at_once(slot: Any) -> None:
    world, plan, _, sender, trainer = slot
    tables = of_part(plan.part(0), trainer.leased)
    windows = (dataclasses.replace(tables.windows[0], bucket_bytes=64), *tables.windows[1:])
    consumer = Parameters(world.engines[0])
    thread = _lent_at_once(slot, consumer, dataclasses.replace(tables, windows=windows))
    assert "sends nothing, and its windows bring bytes" in str(thread.end()) and not consumer.flat
    sender.abort("refused")


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("source_offset", -1, "leaves its memory"),
        ("source_offset", 1 << 40, "leaves its memory"),
        ("source", 10_000, "leaves its memory"),
        ("source", -1, "leaves its memory"),
        ("target", 10_000, "leaves its memory"),
        ("target_offset", 1 << 40, "leaves its memory"),
        ("rows", 0, "leaves its memory"),
        ("wire", 77, "leaves its memory"),
    ],
)
def test_a_copy_that_leaves_its_memory_is_refused_before_anything_is_copied(slot, field, value, what) -> None:
    _, plan, _, _, trainer = slot
    tables = of_part(plan.part(0), trainer.leased)
    room = [trainer.segment.buffer.numel()]
    tables.check(room, SYNC.bucket_bytes)
    local = tables.windows[0].local.copy()
    local[field][0] = value
    changed = tables.encode()
    bad = Tables.decode(changed)
    object.__setattr__(bad.windows[0], "local", local)
    with pytest.raises(WeightSyncError, match=what):
        bad.check(room, SYNC.bucket_bytes)
    with pytest.raises(WeightSyncError, match="leaves the leased buffers"):
        tables.check([room[0] // 2], SYNC.bucket_bytes)


def test_tables_survive_the_wire_and_garbage_does_not(slot: Any) -> None:
    _, plan, _, _, trainer = slot
    tables = of_part(plan.part(0), trainer.leased)
    again = Tables.decode(tables.encode())
    assert again.digest == tables.digest and again.num_bytes == tables.num_bytes
    for garbage in ({}, {"sources": 1}, tables.encode() | {"windows": [["!", "!", [], [], 0]]}):
        with pytest.raises(WeightSyncError, match="malformed plan tables"):
            Tables.decode(garbage)


# -- a killed peer, a flipped bit, over every transport ------------------------------------------------------------


class Pair:
    """One trainer rank in this process; its receiver here or in another one."""

    def __init__(self, wire: Wire, address: str, seconds: float) -> None:
        transport: Any = wire.kind if wire.kind in MESHES else "auto"
        sync = SyncSection(bucket_bytes=16 << 10, deadline_seconds=seconds, transport=transport)
        self.trainer = BenchTrainer(TINY, Layout(), 0, device=wire.device)
        self.weight_sync = PlannedSync(
            self.trainer,
            sync,
            [address],
            engine_manifests.engine_rank_manifests(TINY, Layout()),
            topology=Topology.on([0]) if transport == "auto" else Topology.beside([0]),
            store=f"tcp://127.0.0.1:{wire.port}",
        )
        self.trainer.fill(0)

    def close(self) -> None:
        self.weight_sync.close()
        self.trainer.close()


class Ending(Windows):
    """Does something at the first window, the middle one or the end."""

    def __init__(self, storage: Storage, at: str, action: Callable[[], None]) -> None:
        super().__init__(storage)
        self._at, self._action = at, action

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        if index == {"first": 0, "middle": len(self._tables.windows) // 2}.get(self._at):
            self._action()
        super().apply(index, sources, bucket)

    def finish(self) -> None:
        if self._at == "finish":
            self._action()


def receive_and_die(wire: Wire, at: str, pipe: Any) -> None:
    receiver = wire.receiver(120.0)
    pipe.send(receiver.address)
    storage = Storage(engine_manifests.engine_rank_manifests(TINY, Layout())[0], wire.device)
    receiver.receive(pipe.recv(), Ending(storage, at, kill_self))


@pytest.fixture(params=KINDS)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    meeting = store()
    yield Wire(request.param, meeting.port)
    del meeting


@pytest.mark.parametrize("at", ["first", "middle", "finish"])
def test_a_receiver_killed_in_a_planned_session_ends_it_and_another_takes_its_place(wire, at) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = Rank(target=receive_and_die, args=(wire, at, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    pair = Pair(wire, ours.recv(), 120.0)
    session = Session.new(-1, 0, pair.weight_sync.digest)
    ours.send(session)
    with pytest.raises(WeightSyncError, match=f"process {process.pid} ended|connection to tcp://.* closed"):
        pair.weight_sync.send(session)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and pair.trainer.memory.leases == 0
    pair.close()
    fresh = wire.receiver(60.0)
    again = Pair(wire, fresh.address, 60.0)
    storage = Storage(engine_manifests.engine_rank_manifests(TINY, Layout())[0], wire.device)
    session = Session.new(-1, 0, again.weight_sync.digest)
    thread = Receiving(fresh, session, Windows(storage))
    again.weight_sync.send(session)
    assert thread.end() is None
    assert storage.first_difference(MadeUp(again.trainer.checkpoint, version=0)) is None
    fresh.close()
    again.close()


class Heard(Faults):
    """Keeps the kinds of what was sent."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def sends(self, message: Message) -> Message:
        self.kinds.append(message.kind)
        return message


def test_inside_a_node_a_session_is_three_words() -> None:
    """The trainer's parameters are read where they lie: nothing is told of windows, and tables are brought once."""
    wire = Wire(KINDS[0], 0)
    receiver = wire.receiver(60.0)
    pair = Pair(wire, receiver.address, 60.0)
    (sender,), storage = (
        pair.weight_sync._endpoints.senders,
        Storage(engine_manifests.engine_rank_manifests(TINY, Layout())[0], CPU),
    )
    for version, more in enumerate((["tables"], [])):
        sender.faults = heard = Heard()
        session = Session.new(version - 1, version, pair.weight_sync.digest, full=False)
        thread = Receiving(receiver, session, Windows(storage))
        pair.weight_sync.send(session)
        assert thread.end() is None
        assert heard.kinds == ["open", *more, "end", "commit"]
    receiver.close()
    pair.close()


class FlipOnce(Faults):
    """Flips one bit of the first bytes that arrive."""

    flipped = False

    def arrived(self, data: torch.Tensor) -> None:
        if not self.flipped:
            self.flipped = True
            data[77] ^= 4


@pytest.mark.parametrize("kind", MESHES)
def test_a_bit_flipped_on_the_way_between_pools_is_refused_and_a_resend_heals(kind: str) -> None:
    """On one slot nothing travels in a planned session: both sides read the same memory."""
    meeting = store()
    wire = Wire(kind, meeting.port)
    receiver = wire.receiver(60.0)
    pair = Pair(wire, receiver.address, 60.0)
    storage = Storage(engine_manifests.engine_rank_manifests(TINY, Layout())[0], CPU)
    receiver.faults = FlipOnce()
    session = Session.new(-1, 0, pair.weight_sync.digest)
    thread = Receiving(receiver, session, Windows(storage))
    with pytest.raises(WeightSyncError, match="received from trainer rank 0 do not have the digest"):
        pair.weight_sync.send(session)
    assert isinstance(thread.end(), WeightSyncError) and receiver.progress.state is ReceiverState.FAILED
    session = Session.new(-1, 0, pair.weight_sync.digest)
    thread = Receiving(receiver, session, Windows(storage))
    pair.weight_sync.send(session)
    assert thread.end() is None and receiver.progress.serving
    assert storage.first_difference(MadeUp(pair.trainer.checkpoint, version=0)) is None
    receiver.close()
    pair.close()
