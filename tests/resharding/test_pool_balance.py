"""The plan between pools loads no link more than it must: random layouts against bounds by manifests."""

import pytest

from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from tests.resharding.pool_layouts import MODELS, Pools, random_pools, ratios

MOST = 1.05
"""Busiest sender or receiver divided by the least possible."""


def check(pools: Pools) -> None:
    for read_buckets in (False, True):
        options = PlanOptions(read_buckets=read_buckets)
        plan = build_plan(pools.trainers, pools.engines, pools.topology, options)
        summary = plan.summary()
        moved = summary["bytes_intra_node"] + summary["bytes_inter_node"]
        assert moved == summary["lower_bound_cross_slot_bytes"] == summary["bytes_needed"]
        sender, receiver = ratios(plan, pools, once_per_node=read_buckets)
        assert max(sender, receiver) <= MOST, f"{pools.train} to {pools.rollout}, {read_buckets=}"


@pytest.mark.parametrize("seed", range(20))
def test_busiest_sender_and_receiver_of_pools_are_at_the_optimum(seed: int) -> None:
    check(random_pools(seed))


@pytest.mark.slow
def test_busiest_sender_and_receiver_of_three_hundred_pools_are_at_the_optimum() -> None:
    for seed in range(1000, 1300):
        check(random_pools(seed))


@pytest.mark.parametrize("trainer_tp", [1, 2, 4])
def test_engines_with_twice_the_tensor_parallel_size_of_a_dense_trainer(trainer_tp: int) -> None:
    """With senders of the same rail preferred, as on shared slots, the busiest sends 1.48 times the least."""
    hf = MODELS[0] | {"num_hidden_layers": 8}
    train, rollout = Layout(tp=trainer_tp, dp=8 // trainer_tp), Layout(tp=2 * trainer_tp, dp=4 // trainer_tp)
    held = trainer_manifests.trainer_rank_manifests(hf, train)
    needed = engine_manifests.engine_rank_manifests(hf, rollout)
    nodes = [rank // 8 for rank in range(len(held) + len(needed))]
    topology = Topology.separate_pools(nodes, num_trainers=len(held))
    check(Pools(hf, train, rollout, held, needed, topology))
