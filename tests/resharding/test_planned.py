"""Planned weight syncs between real processes: every slot ends with its manifest's bytes, or all raise."""

import dataclasses
import datetime
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.resharding.models import TINY
from benchmarks.resharding.trainer import BenchTrainer
from mrl.errors import WeightSyncError
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.transfer import receiver as receiver_module
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.lease import Lease, describe_files, reuse_or_open_lease
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import ReceiverState, Session
from mrl.resharding.transfer.slot_tables import Tables, tables_of
from mrl.resharding.wire.shared_memory import SharedSegment
from mrl.training.platform.parameter_memory import _free_pages
from tests.ranks import run_ranks
from tests.resharding.exchanges import Receiving
from tests.resharding.faults import change_messages
from tests.resharding.footprint import Footprint, require_no_leak
from tests.resharding.leasing import LeasedRank
from tests.resharding.planned import SYNC, Parameters, equal, plan_of, world_of
from tests.resharding.pools import Broken
from tests.resharding.slots import CPU, Slot
from tests.resharding.worlds import checkpoint, loaded


def one_slot(
    rank: int, size: int, port: int, layout: Layout, rollout: Layout, node: int, broken: bool
) -> Any:
    """Run both ends of a slot and count bytes from other nodes on arrival."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    exchange, sizes = RankGroup.exchange, []

    def counting(self: RankGroup, sends: Any, receives: Any) -> list[Any]:
        # weights; digests of 8 bytes come after them
        sizes.extend(data.numel() for _, data in receives if data.dtype == torch.uint8)
        return exchange(self, sends, receives)

    RankGroup.exchange = counting  # type: ignore[method-assign]
    manifests = engine_manifests.engine_rank_manifests(TINY, rollout)
    slot = Slot(BenchTrainer(TINY, layout, rank, device=CPU), manifests, rank, slots_per_node=node)
    slot.trainer.fill(0)
    error = slot.sync(0, Broken(slot.storage) if rank == 1 else None) if broken else ""
    sizes.clear()
    again, outcome, summary = slot.sync(0), slot.outcome(0), slot.weight_sync.plan.summary()
    slot.close()
    dist.destroy_process_group()
    return error, again, outcome, sum(sizes), summary


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "rollout", "slots_per_node", "broken"),
    [
        (Layout(tp=2, ep=2), Layout(tp=2), 1, False),
        (Layout(cp=2, ep=2), Layout(dp=2), 1, False),
        (Layout(pp=2), Layout(tp=2), 1, True),
        (Layout(tp=2, pp=2), Layout(tp=2, dp=2), 2, False),
        (Layout(ep=2, dp=4), Layout(tp=4), 2, False),
    ],
    ids=str,
)
def test_every_slot_ends_with_its_bytes_of_which_only_the_plans_cross_nodes(
    layout: Layout, rollout: Layout, slots_per_node: int, broken: bool
) -> None:
    """Every rank raises one slot's error, and a resend heals it."""
    results = run_ranks(one_slot, layout.world_size, layout, rollout, slots_per_node, broken, seconds=240)
    for error, again, outcome, _, _ in results:
        assert ("broken on purpose in window" in error) == broken
        assert (again, outcome) == ("", (True, None))
    crossed = sum(r[3] for r in results)
    assert crossed == results[0][4]["bytes_inter_node"]
    assert (crossed == 0) == (layout.dp == 4), (
        "with ep2 x dp4 both slots of a node together have every weight"
    )


@pytest.fixture
def slot():
    world = world_of()
    plan = plan_of(world)
    receiver = Receiver(deadline_seconds=30.0, device=torch.device("cpu"))
    sender = WeightSender(receiver.address, SYNC)
    trainer = LeasedRank(world.trainers[0].tensors, loaded(world.trainers[0], checkpoint(world)))
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
    """The engine got its own layout's digest; for another plan nothing is mapped, started or copied."""
    world, plan, receiver, sender, trainer = slot
    other = build_plan(
        world.trainers, world.engines, world.topology, PlanOptions(bucket_bytes=SYNC.bucket_bytes * 2)
    )
    mapped: list[Any] = []
    monkeypatch.setattr(receiver_module, "reuse_or_open_lease", lambda old, lease: mapped.append(lease))
    monkeypatch.setattr(receiver_module, "SlotInbox", lambda *_: mapped.append("buffers"))
    consumer = Parameters(world.engines[0])
    session = Session.new(-1, 0, plan.digest)
    thread = Receiving(receiver, session, consumer)
    with pytest.raises(WeightSyncError, match=f"digest {other.digest[:12]}.*expected .* {plan.digest[:12]}"):
        trainer.send(sender, dataclasses.replace(session, digest=other.digest), other, 0, group=None)
    assert isinstance(thread.end(), WeightSyncError)
    assert not mapped and not consumer._flat and receiver.progress.version == -1
    monkeypatch.undo()
    _exchange(slot, Session.new(-1, 0, plan.digest))


def test_a_lease_of_an_earlier_session_is_refused_before_it_is_opened(slot, monkeypatch) -> None:
    """A sender repeats an old session and its description while the receiver waits for the next."""
    world, plan, receiver, sender, trainer = slot
    old = Session.new(-1, 0, plan.digest)
    _exchange(slot, old)
    opened: list[Any] = []
    monkeypatch.setattr(
        receiver_module,
        "reuse_or_open_lease",
        lambda old, lease: opened.append(lease) or reuse_or_open_lease(old, lease),
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
    """Later sessions read the same mapping; memory that the owner frees is free although mapped."""
    segments = [SharedSegment(1 << 20) for _ in range(2)]
    (one,), (other,) = (describe_files([(s.export()["fd"], 1 << 20)]) for s in segments)
    lease = reuse_or_open_lease(None, [one])
    for value in (3, 7):
        segments[0].buffer.fill_(value)
        assert reuse_or_open_lease(lease, [one]) is lease and (lease.buffers[0] == value).all()
    _free_pages(one["fd"])
    assert os.fstat(one["fd"]).st_blocks == 0
    newer = reuse_or_open_lease(lease, [other])
    assert newer is not lease and not lease.buffers
    newer.close()
    for segment in segments:
        segment.close()


def _exchange(slot: Any, session: Session) -> None:
    world, plan, receiver, sender, trainer = slot
    consumer = Parameters(world.engines[0])
    thread = Receiving(receiver, session, consumer)
    trainer.send(sender, session, plan, 0, group=None)
    assert thread.end() is None and equal(consumer, world, 0)


class Slow(Parameters):
    def __init__(self, manifest: RankManifest) -> None:
        super().__init__(manifest)
        self.begun, self.may = threading.Event(), threading.Event()

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        self.begun.set()
        assert self.may.wait(60)
        super().apply(index, sources, bucket)


def _lent_at_once(slot: Any, consumer: Parameters, tables: Tables) -> Receiving:
    """Return a receiver with a session whose bytes are all in leased memory."""
    _, plan, receiver, sender, trainer = slot
    session = Session.new(-1, 0, plan.digest, full=False)
    thread = Receiving(receiver, session, consumer)
    lease = describe_files([(trainer.segment.export()["fd"], trainer.segment.buffer.numel())])
    sender.announce(session, tables, lease=lease, at_once=True)
    sender.accepted(tables)
    return thread


def test_a_receiver_that_was_lent_everything_begins_and_waits_for_no_word(slot: Any) -> None:
    """It waits for the end only; the ranks agree on their progress after the copies."""
    world, plan, receiver, sender, trainer = slot
    consumer = Slow(world.engines[0])
    thread = _lent_at_once(slot, consumer, tables_of(plan.part(0), trainer.leased))
    assert consumer.begun.wait(60) and receiver.progress.state is ReceiverState.RECEIVING
    consumer.may.set()
    sender.finish()
    assert equal(consumer, world, 0)
    sender.commit()
    assert thread.end() is None and receiver.progress.serving


def test_a_sender_that_gives_up_is_heard_after_what_is_being_copied(slot: Any) -> None:
    world, plan, receiver, sender, trainer = slot
    consumer = Slow(world.engines[0])
    thread = _lent_at_once(slot, consumer, tables_of(plan.part(0), trainer.leased))
    assert consumer.begun.wait(60)
    sender.abort("another rank broke")
    consumer.may.set()
    assert "another rank broke" in str(thread.end()) and receiver.progress.state is ReceiverState.FAILED
    assert consumer.aborts == 1 and receiver._lease is None


def test_windows_that_bring_bytes_are_not_taken_at_once(slot: Any) -> None:
    world, plan, _, sender, trainer = slot
    tables = tables_of(plan.part(0), trainer.leased)
    windows = (dataclasses.replace(tables.windows[0], bucket_bytes=64), *tables.windows[1:])
    consumer = Parameters(world.engines[0])
    thread = _lent_at_once(slot, consumer, dataclasses.replace(tables, windows=windows))
    assert "sends no messages, but its windows need some" in str(thread.end()) and not consumer._flat
    sender.abort("refused")


@pytest.mark.parametrize(
    ("field", "value", "text"),
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
def test_a_copy_that_leaves_its_memory_is_refused_before_anything_is_copied(slot, field, value, text) -> None:
    _, plan, _, _, trainer = slot
    tables = tables_of(plan.part(0), trainer.leased)
    room = [trainer.segment.buffer.numel()]
    tables.check(room, SYNC.bucket_bytes)
    local = tables.windows[0].local.copy()
    local[field][0] = value
    changed = tables.encode()
    bad = Tables.decode(changed)
    object.__setattr__(bad.windows[0], "local", local)
    with pytest.raises(WeightSyncError, match=text):
        bad.check(room, SYNC.bucket_bytes)
    with pytest.raises(WeightSyncError, match="leaves the leased buffers"):
        tables.check([room[0] // 2], SYNC.bucket_bytes)


def test_tables_survive_the_wire_and_garbage_does_not(slot: Any) -> None:
    _, plan, _, _, trainer = slot
    tables = tables_of(plan.part(0), trainer.leased)
    again = Tables.decode(tables.encode())
    assert again.digest == tables.digest and again.num_bytes == tables.num_bytes
    for garbage in ({}, {"sources": 1}, tables.encode() | {"windows": [["!", "!", [], [], 0]]}):
        with pytest.raises(WeightSyncError, match="malformed plan tables"):
            Tables.decode(garbage)


def test_inside_a_node_a_session_is_three_words() -> None:
    """The trainer's parameters are read in place: no window messages, and tables are sent once."""
    manifests = engine_manifests.engine_rank_manifests(TINY, Layout())
    slot, kinds = Slot(BenchTrainer(TINY, Layout(), 0, device=CPU), manifests), []
    (sender,) = slot.weight_sync._senders.values()
    change_messages(sender, lambda message: (kinds.append(message.kind), message)[1])
    for version, extra in enumerate((["tables"], [])):
        kinds.clear()
        assert slot.sync(version, full=False) == "" and kinds == ["open", *extra, "end", "commit"]
    slot.close()
