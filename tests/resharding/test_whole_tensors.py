"""Tensors that cannot be planned are named, counted and come whole; known families have none."""

from typing import Any

import pytest
import torch

from benchmarks.resharding.models import TINY
from benchmarks.resharding.storage import Storage, StorageConsumer
from benchmarks.resharding.trainer import BenchTrainer
from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, quantised
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.receiver import Receiver
from tests.resharding.slots import CPU, Slot
from tests.resharding.wires import store
from tests.resharding.worlds import FAMILIES, random_world

ODD = "model.layers.1.self_attn.qkv_proj"
"""A module that engines in these tests fill by other means than copies of boxes."""
WHOLE = tuple(f"model.layers.1.self_attn.{p}_proj.weight" for p in "kqv")


def traced() -> tuple[RankManifest, RankManifest]:
    """Return (all parameters of an engine rank, those that its trace can place)."""
    (full,) = engine_manifests.engine_rank_manifests(TINY, Layout())
    placed = [t for t in full.tensors if not t.name.startswith(ODD)]
    assert len(placed) == len(full.tensors) - 1
    return full, RankManifest.of(0, placed, WHOLE)


class Counting(StorageConsumer):
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
    """Whole tensors come with parameters in two or more windows; an error there fails the session."""
    full, manifest = traced()
    meeting = store()
    sync = SyncSection(bucket_bytes=8 << 10, deadline_seconds=60.0, transport=transport)
    trainer, address = BenchTrainer(TINY, Layout(), 0, device=CPU), f"tcp://127.0.0.1:{meeting.port}"
    slot = Slot(trainer, [full], planned_for=[manifest], sync=sync, store=address)
    assert sorted(slot.weight_sync.plan.whole_tensors) == sorted(WHOLE)
    size = sum(2 * t.shape[0] * t.shape[1] for t in trainer.checkpoint if t.name in WHOLE)
    assert slot.weight_sync.plan.summary()["whole_bytes"] == size
    for version, broken in ((0, False), (1, True), (1, False)):
        trainer.fill(version)
        consumer = Counting(slot.storage, broken)
        error = slot.sync(version, consumer)
        assert ("broken on purpose at a whole tensor" in error) == broken, error
        if not broken:
            assert slot.figures["whole_bytes"] == size and sorted(consumer.whole) == sorted(WHOLE)
            assert slot.outcome(version) == (True, None)
    slot.close()


def test_query_groups_inside_blocks_come_whole_and_are_quantised_on_arrival() -> None:
    """Megatron interleaves 128 query, 64 key and 64 value rows; the last two are inside blocks."""
    hf = TINY | {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
    manifest = quantised.quantised_manifest(engine_manifests.engine_rank_manifests(hf, Layout())[0])
    slot = Slot(BenchTrainer(hf, Layout(), 0, device=CPU), [manifest])
    whole = [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in range(4) for p in "qkv"]
    assert slot.weight_sync.plan.whole_tensors.keys() == set(whole)
    for version in range(2):
        slot.trainer.fill(version)
        consumer = Counting(slot.storage)
        assert slot.sync(version, consumer) == "" and sorted(consumer.whole) == sorted(whole)
        assert slot.figures["whole_bytes"] == 4 * (256 + 128 + 128) * 256 * 2
        assert slot.outcome(version) == (True, None)
    slot.close()


def test_a_whole_tensor_that_no_trainer_holds_is_named() -> None:
    _, manifest = traced()
    other = RankManifest.of(0, manifest.tensors, (*manifest.unplanned, "model.extra.weight"))
    receiver = Receiver(deadline_seconds=1.0, device=CPU)
    trainer = BenchTrainer(TINY, Layout(), 0, device=CPU)
    with pytest.raises(WeightSyncError, match=r"model\.extra\.weight"):
        PlannedSync(trainer, SyncSection(), [receiver.address], [other], topology=Topology.shared_slots([0]))
    receiver.close()
    trainer.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_known_families_comes_whole(family: str) -> None:
    """Live engines' manifests equal these (vllm/test_trace), so this is true of them too."""
    for seed in range(5):
        world = random_world(seed, family=family)
        plan = build_plan(world.trainers, world.engines, world.topology, world.options)
        assert not plan.whole_tensors and plan.summary()["whole_bytes"] == 0
        assert {i.tensor for i in plan.items} == {
            t.name for t in family_of(world.hf).checkpoint_tensors(world.hf)
        }


def test_a_rank_that_takes_a_tensor_whole_changes_the_plans_digest() -> None:
    world = random_world(3, family="qwen3_moe")
    name = world.trainers[0].tensors[0].pieces[0].tensor
    first, *others = world.engines
    odd = RankManifest.of(first.rank, first.tensors, [name])
    plans = [
        build_plan(world.trainers, d, world.topology, world.options) for d in (world.engines, [odd, *others])
    ]
    assert plans[0].digest != plans[1].digest and plans[1].whole_tensors.keys() == {name}
