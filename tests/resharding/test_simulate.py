"""The whole chain on plain arrays: trainer layout, plan, bytes, engine layout, against gather-then-load."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.errors import WeightSyncError
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import build_plan
from mrl.resharding.planner.quantised import leave_whole
from mrl.resharding.planner.slot_plan import SlotPart
from mrl.resharding.planner.whole_tensors import whole_tensor_of, with_whole_tensors
from tests.resharding.simulate import execute, write_counts
from tests.resharding.worlds import (
    FAMILIES,
    World,
    as_engines_want,
    box,
    checkpoint,
    gathered,
    loaded,
    random_world,
)

CI = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(min_value=0, max_value=1 << 32)


def check_world(seed: int, *, quantise: bool = False) -> None:
    world = random_world(seed, quantise=quantise)
    plan = build_plan(world.trainers, world.engines, world.topology, world.options)
    made = checkpoint(world)
    storages = [loaded(manifest, made) for manifest in world.trainers]
    together = gathered(world, storages)
    assert together.keys() == made.keys()
    results = execute(plan, storages)
    planned = leave_whole(world.trainers, world.engines, world.options.quantise_block)
    planned = with_whole_tensors(world.trainers, planned)
    wanted = as_engines_want(world, together)
    for manifest, result in zip(planned, results, strict=True):
        for tensor in manifest.tensors:
            full = together if whole_tensor_of(tensor.name) else wanted
            (expected,) = loaded(RankManifest.of(manifest.rank, [tensor]), full)
            assert result[tensor.name].tobytes() == expected.tobytes(), (seed, manifest.rank, tensor.name)
    check_written_once(planned, plan)
    summary = plan.summary()
    moved = summary["bytes_intra_node"] + summary["bytes_inter_node"]
    assert moved == summary["lower_bound_cross_slot_bytes"]
    for slot in range(world.topology.num_slots):
        part = plan.part(slot)
        assert max(part.send_bucket_bytes, part.receive_bucket_bytes) <= world.options.bucket_bytes
        check_neighbours(world, part)


def check_neighbours(world: World, part: SlotPart) -> None:
    """Engine ranks read what their node holds or their slot alone, by the options, and messages bring the rest."""
    topology, reads = world.topology, world.options.read_neighbours
    for slot in (topology.trainer_slots[rank] for rank in part.lenders):
        assert slot == part.slot or (reads and topology.nodes[slot] == topology.nodes[part.slot])
    for message in (m for window in part.windows for m in (*window.sends, *window.receives)):
        assert not (reads and topology.nodes[message.peer] == topology.nodes[part.slot])


def check_written_once(engines, plan) -> None:
    for manifest, counts in zip(engines, write_counts(plan), strict=True):
        for tensor in manifest.tensors:
            boxes = np.zeros(tensor.shape, np.uint16)
            for piece in tensor.pieces:
                extra = len(tensor.shape) - len(piece.shape)
                boxes[piece.local_start[:extra]][box(piece.local_start[extra:], piece.shape)] += 1
            assert boxes.max(initial=0) <= 1
            np.testing.assert_array_equal(counts[tensor.name], boxes)


@CI
@given(SEEDS)
def test_any_layout_equals_gather_then_load(seed):
    check_world(seed)


@settings(CI, max_examples=30)
@given(SEEDS)
def test_any_layout_equals_gather_quantise_load(seed):
    check_world(seed, quantise=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@LONG
@given(SEEDS)
def test_any_layout_equals_gather_quantise_load_long(seed):
    check_world(seed, quantise=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@LONG
@given(SEEDS)
def test_any_layout_equals_gather_then_load_long(seed):
    check_world(seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_arrays_give_the_same_bytes_as_numpy(family):
    world = random_world(7, family=family)
    plan = build_plan(world.trainers, world.engines, world.topology, world.options)
    storages = [loaded(manifest, checkpoint(world)) for manifest in world.trainers]
    tensors = [
        [
            torch.from_numpy(a.view(np.uint8)).view(getattr(torch, t.dtype)).view(t.shape)
            for t, a in zip(m.tensors, s, strict=True)
        ]
        for m, s in zip(world.trainers, storages, strict=True)
    ]
    for ours, theirs in zip(execute(plan, storages), execute(plan, tensors), strict=True):
        for name, array in ours.items():
            assert torch.equal(torch.from_numpy(array.view(np.uint8)), theirs[name].view(torch.uint8)), name


def test_wrong_storage_is_refused_by_name():
    world = random_world(3, family="qwen3_moe")
    plan = build_plan(world.trainers, world.engines, world.topology, world.options)
    storages = [loaded(manifest, checkpoint(world)) for manifest in world.trainers]
    by_name = {(t.chunk, t.name): a for t, a in zip(world.trainers[0].tensors, storages[0], strict=True)}
    lost = next(iter(by_name))
    del by_name[lost]
    with pytest.raises(WeightSyncError, match=lost[1].replace(".", r"\.")):
        execute(plan, [by_name, *storages[1:]])
