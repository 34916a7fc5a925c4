"""The whole chain on plain arrays (trainer layout, plan, bytes, engine layout) equals gather-then-load."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import build_plan
from mrl.resharding.planner.quantised import without_cut_modules
from mrl.resharding.planner.slot_plan import SlotPart
from mrl.resharding.planner.whole_tensors import whole_tensor_of, with_whole_tensors
from tests.resharding.simulate import execute, write_counts
from tests.resharding.worlds import (
    World,
    as_engines_want,
    box,
    checkpoint,
    gathered,
    loaded,
    random_world,
    same_bits,
)

CI = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(min_value=0, max_value=1 << 32)


def check_worlds(count: int, *, quantise: bool) -> None:
    settings(CI, max_examples=count)(given(SEEDS)(lambda seed: check_world(seed, quantise=quantise)))()


def check_world(seed: int, *, quantise: bool) -> None:
    world = random_world(seed, quantise=quantise)
    plan = build_plan(world.trainers, world.engines, world.topology, world.options)
    made = checkpoint(world)
    storages = [loaded(manifest, made) for manifest in world.trainers]
    together = gathered(world, storages)
    assert together.keys() == made.keys()
    results = execute(plan, storages)
    planned = without_cut_modules(world.trainers, world.engines, world.options.quantise_block)
    planned = with_whole_tensors(world.trainers, planned)
    wanted = as_engines_want(world, together)
    for manifest, result in zip(planned, results, strict=True):
        for tensor in manifest.tensors:
            full = together if whole_tensor_of(tensor.name) else wanted
            (expected,) = loaded(RankManifest.of(manifest.rank, [tensor]), full)
            assert same_bits(result[tensor.name], expected), (seed, manifest.rank, tensor.name)
    check_written_once(planned, plan)
    summary = plan.summary()
    moved = summary["bytes_intra_node"] + summary["bytes_inter_node"]
    assert moved == summary["lower_bound_cross_slot_bytes"]
    for slot in range(world.topology.num_slots):
        part = plan.part(slot)
        sizes = (part.send_bucket_bytes, *(window.bucket_bytes for window in part.windows))
        assert max(sizes) <= world.options.bucket_bytes
        check_neighbours(world, part)


def check_neighbours(world: World, part: SlotPart) -> None:
    """Check that engine ranks read their node's bytes, or their slot's only; messages bring the others."""
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


@pytest.mark.parametrize("worlds", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_any_layout_equals_gather_then_load(worlds: int) -> None:
    check_worlds(worlds, quantise=False)


@pytest.mark.parametrize("worlds", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_any_layout_equals_gather_quantise_load(worlds: int) -> None:
    check_worlds(worlds, quantise=True)
