"""No order of processes deadlocks, and no engine ever commits a mixture."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.resharding.planner.plan import build_plan
from tests.resharding.rehearsal import Kill, State, rehearse
from tests.resharding.simulate import execute
from tests.resharding.worlds import checkpoint, loaded, random_world, same_bits

CI = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(min_value=0, max_value=1 << 32)


def planned(seed: int):
    world = random_world(seed)
    plan = build_plan(world.trainers, world.engines, world.topology, world.options)
    full = checkpoint(world)
    return plan, [loaded(manifest, full) for manifest in world.trainers]


def check_delays(seed: int) -> None:
    plan, storages = planned(seed)
    expected = execute(plan, storages)
    outcome = rehearse(plan, storages, seed=seed)
    assert set(outcome.states.values()) == {State.COMMITTED}
    check_committed(outcome, expected)


def check_kill(seed: int) -> None:
    plan, storages = planned(seed)
    expected = execute(plan, storages)
    rng = random.Random(seed)
    role = rng.choice(["exchange", "engine"])
    slots = plan.topology.engine_slots if role == "engine" else range(plan.topology.num_slots)
    kill = Kill(role, rng.choice(slots), after=rng.randrange(2 * len(plan.windows) + 2))
    outcome = rehearse(plan, storages, seed=seed, kills=[kill])
    check_committed(outcome, expected)
    survivors = {state for state in outcome.states.values() if state is not State.DEAD}
    finished = State.COMMITTED in survivors
    assert not (finished and State.FAILED in survivors), outcome.states


def check_committed(outcome, expected) -> None:
    for rank, arrays in outcome.tensors.items():
        for name, flat in zip(expected[rank], arrays, strict=True):
            assert same_bits(flat, expected[rank][name]), (rank, name)


@CI
@given(SEEDS)
def test_random_delays_never_deadlock(seed):
    check_delays(seed)


@CI
@given(SEEDS)
def test_a_kill_at_any_point_never_commits_a_mixture(seed):
    check_kill(seed)
