"""Simulated runs: times against a reference that counts token by token, and what must be true of every schedule."""

import itertools
import random

import pytest

from mrl.pool.ledger import Admission, End, State
from mrl.simulation.engine import Asked, Engine
from mrl.simulation.leaves import EngineSpeed, Leaves
from mrl.simulation.load import Load, log_normal, resampled
from mrl.simulation.world import World

SPEED = EngineSpeed.linear(6, fixed=0.02, per_sequence=0.001, per_context=1e-4, prefill=2e-3)


def counted_seconds(speed: EngineSpeed, requests: list[tuple[int, int]]) -> float:
    """Of (tokens, context) requests, begun in this order as others end; one decode step after the other."""
    waiting, running, seconds = list(requests), [], 0.0
    while waiting or running:
        while waiting and len(running) < speed.capacity:
            tokens, context = waiting.pop(0)
            running.append([tokens, context])
            seconds += context * speed.prefill_seconds
        seconds += speed.step(len(running), sum(context for _, context in running))
        running = [[tokens - 1, context + 1] for tokens, context in running if tokens > 1]
    return seconds


def counted_step(leaves: Leaves, load: Load, indices: range) -> float:
    """A step under on_policy: engine i has every prompt whose index leaves i, and training waits for all of them."""
    engines: list[list[tuple[int, int]]] = [[] for _ in range(leaves.num_engines)]
    for index in indices:
        engines[index % leaves.num_engines] += [(n, load.prompt_tokens) for n in load.lengths(index)]
    tokens = sum(n + context for requests in engines for n, context in requests)
    generating = max(counted_seconds(leaves.engine, requests) for requests in engines)
    return generating + leaves.turn_seconds + leaves.train_seconds(tokens) + leaves.sync_seconds


@pytest.mark.parametrize("shares_slots", [True, False])
def test_age_0_takes_the_time_of_on_policy_counted_token_by_token(shares_slots: bool) -> None:
    load = Load(log_normal(4, mean=30, sigma=0.9, most=90), prompt_tokens=7)
    turn = 0.4 if shares_slots else 0.0
    leaves = Leaves(SPEED, 3, shares_slots, 0.5, 1e-3, sync_seconds=0.3, turn_seconds=turn)
    rows = World(leaves, Admission(batch=8), load, by_index=True).run(4)
    counted = [counted_step(leaves, load, range(8 * n, 8 * n + 8)) for n in range(4)]
    assert [row.seconds for row in rows] == pytest.approx(counted, rel=1e-9)
    assert all(row.ages.keys() == {0} for row in rows)


def test_a_parked_request_loses_no_time_but_its_prefill() -> None:
    """Stopped at any moment and begun again, a request takes as long as without, and the context's prefill."""
    for stop in (0.001, 0.31, 0.77):
        engine = Engine(SPEED)
        engine.submit(Asked(0, 20, 5))
        whole = engine.begin(0.0)
        ((parked, left),) = engine.park(stop)
        engine.submit(Asked(0, left, parked.size - left))
        made = 20 - left
        began = counted_seconds(SPEED, [(made, 5)]) if made else 5 * SPEED.prefill_seconds
        again = engine.begin(10.0) - 10.0
        assert began + again == pytest.approx(whole + (5 + made) * SPEED.prefill_seconds)


def drawn(seed: int) -> tuple[Leaves, Admission, Load]:
    dice = random.Random(seed)
    shares, batch = dice.random() < 0.5, dice.randint(1, 6)
    leaves = Leaves(
        EngineSpeed.linear(
            dice.randint(1, 8), dice.uniform(0.005, 0.02), 1e-4, dice.choice([0.0, 1e-5]), 1e-4
        ),
        num_engines=dice.randint(1, 4),
        shares_slots=shares,
        train_fixed_seconds=dice.uniform(0.0, 1.0),
        train_seconds_per_token=dice.uniform(0.0, 2e-3),
        sync_seconds=dice.choice([0.0, 0.2]),
        park_seconds=dice.choice([0.0, 0.1]),
        verdict_seconds=dice.choice([0.0, 0.5]),
    )
    admission = Admission(
        batch,
        max_age=dice.randint(0, 5),
        sync_every=dice.choice([1, 1, 2, 3]),
        most_fruitless=10 * batch,
    )
    draw = log_normal(dice.randint(1, 4), mean=40, sigma=0.9, most=160)
    return leaves, admission, Load(draw, prompt_tokens=5, filtered=dice.choice([0.0, 0.4]), seed=seed)


@pytest.mark.parametrize("seeds", [range(0, 60)])
def test_ages_stay_within_the_bound_and_each_prompt_comes_once(seeds: range) -> None:
    reached = 0
    for seed in seeds:
        leaves, admission, load = drawn(seed)
        world = World(leaves, admission, load)
        rows = world.run(8)
        oldest = max(age for row in rows for age in row.ages)
        assert oldest <= admission.age_bound and all(min(row.ages, default=0) >= 0 for row in rows)
        reached += oldest == admission.max_age + admission.sync_every - 1
        ledger = world.ledger
        taken = 8 * admission.batch
        alive = len(ledger.entries(State.MAKING, State.KEPT))
        assert taken + ledger.ends[End.FILTERED] + alive == ledger.next_index
        kept = [i for i in range(ledger.next_index) if load.is_kept(i) and i not in ledger][:taken]
        if not ledger.uncommitted:
            tokens = sum(sum(load.lengths(i)) + load.samples * load.prompt_tokens for i in kept)
            assert tokens == sum(row.tokens for row in rows)
            assert sum(sum(row.ages.values()) for row in rows) == sum(sum(load.lengths(i)) for i in kept)
    assert reached > len(seeds) / 2, "the bound is reached where generation keeps up"


def test_twice_the_engines_are_never_slower() -> None:
    for seed in range(20):
        leaves, admission, load = drawn(seed)
        few, many = (
            sum(row.seconds for row in World(placed, admission, load).run(12))
            for placed in (leaves, Leaves(**{**_fields(leaves), "num_engines": 2 * leaves.num_engines}))
        )
        assert many <= few * 1.02, f"seed {seed}: {many} s against {few} s"


def _fields(leaves: Leaves) -> dict:
    return {name: getattr(leaves, name) for name in leaves.__dataclass_fields__}


def test_a_faster_trainer_or_engine_shortens_the_step_that_it_bounds() -> None:
    """Engines of their own at age 2: the step is the slower half's, and the other one waits."""
    load = Load(resampled([[50, 50]]), prompt_tokens=0)
    slow = EngineSpeed.linear(8, fixed=0.01)
    waits, holds = [], []
    for train in (0.2, 4.0):
        rows = World(Leaves(slow, 1, False, train), Admission(8, max_age=2), load).run(12)[6:]
        waits.append(sum(row.waited_seconds for row in rows))
        holds.append(sum(row.held_seconds for row in rows))
        assert sum(row.seconds for row in rows) / 6 == pytest.approx(max(train, 2 * 50 * 0.01), rel=0.05)
    assert (
        waits[0] > 3 and waits[1] == pytest.approx(0.0) and holds[1] > 10 and holds[0] == pytest.approx(0.0)
    )


def test_verdicts_that_take_long_are_told_apart() -> None:
    load = Load(resampled([[10]]))
    rows = World(Leaves(EngineSpeed.linear(8, 0.01), 1, True, verdict_seconds=3.0), Admission(4), load).run(3)
    assert [row.verdict_seconds for row in rows] == pytest.approx([3.0] * 3)
    assert [row.waited_seconds for row in rows] == pytest.approx([3.1] * 3)


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    draw = log_normal(16, mean=500, sigma=0.9, most=1000)
    load = Load(draw, seed=3)
    lengths = list(itertools.chain.from_iterable(load.lengths(i) for i in range(4000)))
    assert sum(lengths) / len(lengths) == pytest.approx(500, rel=0.02) and max(lengths) == 1000
    assert load.lengths(7) == Load(draw, seed=3).lengths(7) != Load(draw, seed=4).lengths(7)
