"""Dealing samples to ranks: limits hold, ranks wait little, and losses and gradients do not change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms.objective import cross_entropy
from mrl.capacity.model_facts import find_facts
from mrl.config.sections.model import ModelSection
from mrl.models.facts import ModelSize
from mrl.samples import TrainBatch
from mrl.training.balance import SampleBalancer, SampleCost, assign_samples
from mrl.training.batch import merge_parts
from mrl.training.packing import count_microbatches, pack_microbatches, split_samples
from mrl.training.pass_options import PassOptions
from tests.mrl.training import scenarios
from tests.ranks import run_ranks
from tests.tiny_models import batch_of_tokens, random_batch, write_model

LONG = SampleCost(token=1.0, pair=1 / 4000)
"""Attention costs as much as all the rest at 8,000 tokens."""


@given(
    st.lists(st.integers(1, 60), max_size=40),
    st.integers(1, 80),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3]),
)
@settings(max_examples=150, deadline=None)
def test_microbatches_hold_their_limit(sizes: list[int], limit: int, ranks: int, multiple: int) -> None:
    tokens = np.asarray(sizes, np.int64)
    rank, microbatch = assign_samples(tokens, LONG(tokens), ranks=ranks, max_tokens=limit, multiple=multiple)
    assert len(rank) == len(microbatch) == len(sizes)
    assert ((rank >= 0) & (rank < ranks)).all()
    for number in range(int(microbatch.max(initial=-1)) + 1):
        for place in range(ranks):
            inside = tokens[(rank == place) & (microbatch == number)]
            assert len(inside) <= 1 or inside.sum() <= limit


def tails(seed: int, count: int) -> np.ndarray:
    """Return the tokens [count] of samples, 50 to 30,000, with a lognormal's long tail."""
    return np.minimum(np.random.default_rng(seed).lognormal(7, 1.2, count).astype(np.int64) + 50, 30_000)


def by_tokens(lengths: np.ndarray, ranks: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [B] ranks and microbatches: the longest sample to the emptiest rank, and each rank packs."""
    loads, rank, microbatch = [0] * ranks, np.zeros(len(lengths), int), np.zeros(len(lengths), int)
    for position in np.argsort(-lengths, kind="stable").tolist():
        rank[position] = loads.index(min(loads))
        loads[rank[position]] += int(lengths[position])
    for number in range(ranks):
        mine = np.flatnonzero(rank == number)
        for place, part in enumerate(split_samples(lengths[mine], max_tokens=max_tokens)):
            microbatch[mine[part]] = place
    return rank, microbatch


def waiting_share(costs: np.ndarray, rank: np.ndarray, microbatch: np.ndarray, *, ranks: int) -> float:
    """Return the share of time that ranks wait for the slowest one, if they meet at each microbatch."""
    table = np.zeros((ranks, int(microbatch.max(initial=0)) + 1))
    np.add.at(table, (rank, microbatch), costs)
    whole = ranks * table.max(axis=0).sum()
    return float(1.0 - table.sum() / whole) if whole else 0.0


@pytest.mark.parametrize(("ranks", "count", "bound"), [(2, 256, 0.03), (8, 1024, 0.06)])
def test_ranks_wait_little_at_each_microbatch(ranks: int, count: int, bound: float) -> None:
    """Means of 20 batches: long tails, 32,768 tokens a microbatch, attention half the cost at 8,000."""
    prior, after, numbers = [], [], []
    for seed in range(20):
        lengths = tails(seed, count)
        costs = LONG(lengths)
        old, new = (
            by_tokens(lengths, ranks, 32_768),
            assign_samples(lengths, costs, ranks=ranks, max_tokens=32_768),
        )
        prior.append(waiting_share(costs, *old, ranks=ranks))
        after.append(waiting_share(costs, *new, ranks=ranks))
        numbers.append(new[1].max() - old[1].max())
    assert np.mean(after) < bound and np.mean(after) < 0.6 * np.mean(prior), (np.mean(prior), np.mean(after))
    assert max(numbers) <= 0, "more microbatches than before"


def test_equal_sums_over_ranks_are_not_enough() -> None:
    """Rank 0 has its long sample first, rank 1 last: with 12 each, they still wait for each other."""
    costs, rank, microbatch = np.array([9.0, 3, 3, 9]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    assert waiting_share(costs, rank, microbatch, ranks=2) == pytest.approx(1 - 24 / 36)
    lengths = costs.astype(np.int64)
    assert waiting_share(costs, *assign_samples(lengths, costs, ranks=2, max_tokens=9), ranks=2) == 0


def test_a_samples_cost_is_the_models_own_count(tmp_path: Path) -> None:
    facts: ModelSize = find_facts(ModelSection(path=str(write_model(tmp_path / "moe"))))
    cost, lengths = SampleCost.of_model(facts), np.array([7, 300])
    expected = [facts.forward_flops(n, n * n / 2) for n in lengths]
    assert cost(lengths) == pytest.approx(expected)


def test_the_agreed_microbatches_are_packed() -> None:
    batch = batch_of_tokens([[1] * n for n in (5, 2, 4, 9, 3)])
    agreed = dataclasses.replace(batch, microbatches=np.array([1, 0, 3, 1, 0]))
    assert count_microbatches(agreed, max_tokens=4) == 4
    packed = pack_microbatches(agreed, max_tokens=4, num_microbatches=5)
    assert [item.samples.tolist() for item in packed] == [[1, 4], [0, 3], [], [2], []]
    none = agreed.select(np.zeros(0, np.int64))
    assert count_microbatches(none, max_tokens=4) == 1


Dealing = tuple[np.ndarray, np.ndarray]


def dealings(batch: TrainBatch, ranks: int) -> list[Dealing]:
    """Deal by cost; every other sample, packed per rank; at random, some ranks without a microbatch."""
    dealt, parts = SampleBalancer(ranks=ranks, max_tokens=64, cost=LONG)(batch)
    rank = np.zeros(batch.num_samples, np.int64)
    for number, part in enumerate(parts):
        rank[part] = number
    random = np.random.default_rng(3)
    assert dealt.microbatches is not None
    return [
        (rank, dealt.microbatches),
        (random.integers(0, ranks, batch.num_samples), random.integers(0, 5, batch.num_samples)),
    ]


def passes_of_dealings(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int]
) -> list[dict[str, Any]]:
    """Return for each dealing forward()'s arrays and the metrics of an update that barely moves weights."""
    still = scenarios.OptimizerSection(lr=1e-12, weight_decay=0.0)
    at = scenarios.worker(rank, world, port, folder, layout, optimizer=still)
    batch = random_batch(12, seed=1)
    count, results = {"num_tokens": int(batch.loss_mask.sum())}, []
    for rank_of, microbatches in dealings(batch, at.layout.dp):
        mine = np.flatnonzero(rank_of == at.place.dp)
        shard = dataclasses.replace(batch, microbatches=microbatches).select(mine)
        arrays = at.forward(shard, PassOptions(temperature=scenarios.TEMPERATURE))
        metrics = at.update(shard, cross_entropy, count, PassOptions(temperature=scenarios.TEMPERATURE))
        results.append({"mine": mine, "arrays": arrays, "metrics": metrics})
    return results


@pytest.mark.integration
@pytest.mark.parametrize("layout", [{"ep": 2, "dp": 2}], ids=["ep2-dp2"])
def test_losses_gradients_and_logprobs_do_not_depend_on_the_dealing(layout, tmp_path) -> None:
    """Compare two ranks that share experts with one that packs alone; results keep the samples' order."""
    folder, batch = str(write_model(tmp_path / "moe")), random_batch(12, seed=1)
    alone = run_ranks(pass_of_one, 1, folder)[0]
    ranks = run_ranks(passes_of_dealings, 2, folder, layout)
    for first, second in zip(*ranks, strict=True):
        parts = [first["mine"], second["mine"]]
        for name in ("logprobs", "entropy"):
            values = merge_parts(batch, parts, [first["arrays"][name], second["arrays"][name]])
            np.testing.assert_allclose(values, alone["arrays"][name], atol=2e-6)
        for name in ("loss", "grad_norm"):
            assert first["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-6)


def pass_of_one(rank: int, world: int, port: int, folder: str) -> dict[str, Any]:
    at, batch = scenarios.worker(rank, world, port, folder, {}), random_batch(12, seed=1)
    arrays = at.forward(batch, PassOptions(temperature=scenarios.TEMPERATURE))
    count = {"num_tokens": int(batch.loss_mask.sum())}
    metrics = at.update(batch, cross_entropy, count, PassOptions(temperature=scenarios.TEMPERATURE))
    return {"arrays": arrays, "metrics": metrics}
