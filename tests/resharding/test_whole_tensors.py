"""What engines take otherwise than by boxes is named, counted and comes whole, as rows of the plan; for the known families it is nothing."""

import threading
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
from mrl.resharding.planner import engine_manifests, quantised
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import ReceiverState, Session
from tests.resharding.wires import store
from tests.resharding.worlds import FAMILIES, random_world

CPU = torch.device("cpu")
ODD = "model.layers.1.self_attn.qkv_proj"
"""A module that, for these tests, an engine fills by something else than copies of boxes."""
WHOLE = tuple(f"model.layers.1.self_attn.{p}_proj.weight" for p in "kqv")


def traced() -> tuple[RankManifest, RankManifest]:
    """(all of one engine rank's parameters, what a trace of it can place)."""
    (full,) = engine_manifests.engine_rank_manifests(TINY, Layout())
    placed = [t for t in full.tensors if not t.name.startswith(ODD)]
    assert len(placed) == len(full.tensors) - 1
    return full, RankManifest.of(0, placed, WHOLE)


class Counting(Windows):
    """Counts what comes whole, or breaks at it."""

    def __init__(self, storage: Storage, broken: bool = False) -> None:
        super().__init__(storage)
        self.whole: list[str] = []
        self._broken = broken

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        if self._broken:
            raise ValueError("broken on purpose at a whole tensor")
        self.whole.append(name)
        super()._load(name, tensor)


@pytest.mark.parametrize("transport", ["auto", "distributed", "nixl"])
def test_an_unplannable_module_comes_whole_in_the_same_session(transport: Any) -> None:
    """Two windows and more, in which whole tensors come beside parameters; an error there fails the session."""
    full, manifest = traced()
    meeting = store()
    trainer = BenchTrainer(TINY, Layout(), 0, device=CPU)
    sync = SyncSection(bucket_bytes=8 << 10, deadline_seconds=60.0, transport=transport)
    host = None if transport == "auto" else "127.0.0.1"
    receiver = Receiver(deadline_seconds=60.0, device=CPU, host=host)
    topology = Topology.on([0]) if transport == "auto" else Topology.beside([0])
    weight_sync = PlannedSync(
        trainer,
        sync,
        [receiver.address],
        [manifest],
        topology=topology,
        store=f"tcp://127.0.0.1:{meeting.port}",
    )
    assert sorted(weight_sync.plan.whole_tensors) == sorted(WHOLE)
    sizes = {t.name: 2 * t.shape[0] * t.shape[1] for t in trainer.checkpoint if t.name in WHOLE}
    assert weight_sync.plan.summary()["whole_bytes"] == sum(sizes.values())
    storage, committed = Storage(full, CPU), -1
    for attempt in range(3):
        storage.poison()
        trainer.fill(attempt)
        consumer = Counting(storage, broken=attempt == 1)
        session = Session.new(committed, committed + 1, weight_sync.digest)
        errors: list[BaseException] = []

        def take(session: Session = session, consumer: Counting = consumer) -> None:
            try:
                receiver.receive(session, consumer)
            except ValueError as error:
                errors.append(error)  # noqa: B023 the thread ends inside the loop's turn

        thread = threading.Thread(target=take)
        thread.start()
        if attempt == 1:
            with pytest.raises(WeightSyncError, match="broken on purpose at a whole tensor"):
                weight_sync.send(session)
            thread.join(60)
            assert errors and receiver.progress.state is ReceiverState.FAILED
            continue
        report = weight_sync.send(session)
        thread.join(60)
        committed += 1
        assert report["whole_bytes"] == sum(sizes.values())
        assert sorted(consumer.whole) == sorted(WHOLE)
        assert storage.first_difference(MadeUp(trainer.checkpoint, version=attempt)) is None
    receiver.close()
    weight_sync.close()
    trainer.close()


def test_query_groups_inside_blocks_come_whole_and_are_quantised_on_arrival() -> None:
    """Megatron interleaves groups of 128 rows of queries, 64 of keys and 64 of values: the last two lie inside blocks."""
    hf = TINY | {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
    manifest = quantised.quantised_manifest(engine_manifests.engine_rank_manifests(hf, Layout())[0])
    trainer = BenchTrainer(hf, Layout(), 0, device=CPU)
    sync = SyncSection(bucket_bytes=1 << 20, deadline_seconds=60.0)
    receiver = Receiver(deadline_seconds=60.0, device=CPU)
    weight_sync = PlannedSync(trainer, sync, [receiver.address], [manifest], topology=Topology.on([0]))
    whole = [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in range(4) for p in "qkv"]
    assert weight_sync.plan.whole_tensors.keys() == set(whole)
    storage = Storage(manifest, CPU)
    for number in range(2):
        trainer.fill(number)
        storage.poison()
        consumer, session = Counting(storage), Session.new(number - 1, number, weight_sync.digest)
        thread = threading.Thread(target=receiver.receive, args=(session, consumer))
        thread.start()
        report = weight_sync.send(session)
        thread.join(60)
        assert sorted(consumer.whole) == sorted(whole)
        assert report["whole_bytes"] == 4 * (256 + 128 + 128) * 256 * 2
        assert storage.first_difference(MadeUp(trainer.checkpoint, version=number)) is None
    receiver.close()
    weight_sync.close()
    trainer.close()


def test_a_whole_tensor_that_no_trainer_holds_is_named() -> None:
    _, manifest = traced()
    unknown = RankManifest.of(0, manifest.tensors, (*manifest.unplanned, "model.extra.weight"))
    receiver = Receiver(deadline_seconds=1.0, device=CPU)
    trainer = BenchTrainer(TINY, Layout(), 0, device=CPU)
    with pytest.raises(WeightSyncError, match=r"model\.extra\.weight"):
        PlannedSync(trainer, SyncSection(), [receiver.address], [unknown], topology=Topology.on([0]))
    receiver.close()
    trainer.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_known_families_comes_whole(family: str) -> None:
    """Live engines' manifests equal these (vllm/test_trace), so it holds for them too."""
    for seed in range(5):
        world = random_world(seed, family=family)
        plan = build_plan(world.trainers, world.engines, world.topology, world.options)
        assert not plan.whole_tensors


def test_a_rank_that_takes_a_tensor_whole_changes_the_plans_digest() -> None:
    world = random_world(3, family="qwen3_moe")
    name = world.trainers[0].tensors[0].pieces[0].tensor
    first, *others = world.engines
    odd = RankManifest.of(first.rank, first.tensors, [name])
    plans = [
        build_plan(world.trainers, d, world.topology, world.options) for d in (world.engines, [odd, *others])
    ]
    assert plans[0].digest != plans[1].digest and plans[1].whole_tensors.keys() == {name}
