"""Prefixes that are computed once: the same tokens, log-probs and gradients as of whole sequences."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.training import LayoutSection, TrainingSection
from mrl.errors import ConfigError
from mrl.routes import RouteRows, Routes
from mrl.samples import TrainBatch
from mrl.training.balance import SampleBalancer, SampleCost
from mrl.training.packing import count_microbatches, pack_microbatches
from mrl.training.pass_options import PassOptions
from mrl.training.prefixes import MIN_SHARED_TOKENS, prefix_tree, shares_prefixes, with_shared_prefixes
from mrl.training.worker import MegatronWorker
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import name_of
from tests.ranks import run_ranks
from tests.support.transformer_engine import FOLDER
from tests.tiny_models import VOCAB, batch_of_tokens, write_model

OPTIONS = PassOptions(temperature=scenarios.TEMPERATURE, with_router_margins=True)


def grouped(groups: list[list[list[int]]]) -> TrainBatch:
    """Return a batch of groups of sequences, fully predicted."""
    batch = batch_of_tokens([sequence for group in groups for sequence in group])
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return dataclasses.replace(batch, group_ids=numbers, shares_prefixes=True)


def family_batch(seed: int = 0, *, groups: int = 3, longest: int = 9) -> TrainBatch:
    """Return groups of four samples after one prompt, of which two also share a turn."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(low, high)).tolist()

    made = []
    for _ in range(groups):
        prompt, turn = tokens(20, 26), tokens(17, 22)
        made.append([prompt + tokens(1, longest) for _ in range(2)])
        made[-1] += [prompt + turn + tokens(1, longest) for _ in range(2)]
    batch = grouped(made)
    lengths = batch.lengths()
    inside = np.arange(batch.num_tokens) - np.repeat(batch.cu_seqlens[:-1], lengths)
    return dataclasses.replace(batch, loss_mask=inside >= np.repeat(lengths - 12, lengths).clip(min=1))


pieces = st.lists(st.integers(0, 1), max_size=40)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), pieces), min_size=1, max_size=5), min_size=1, max_size=3)
)
@settings(max_examples=150, deadline=None)
def test_every_sequence_is_a_path_of_the_tree(drawn: list[list[tuple[int, list[int]]]]) -> None:
    stems = [[], list(range(20)), list(range(20)) + [5] * 18]
    batch = grouped([[stems[stem] + [9] + tail for stem, tail in group] for group in drawn])
    tree, places = prefix_tree(batch, np.arange(batch.num_samples))
    packed = np.full(tree.num_tokens, -1)
    packed[places] = batch.tokens
    np.testing.assert_array_equal(packed[places], batch.tokens)
    assert (packed >= 0).all()
    starts, ends = tree.starts(), tree.starts()[1:]
    for span in batch.spans(np.arange(batch.num_samples)):
        last = int(np.searchsorted(ends, places[span.stop - 1], side="right"))
        path = [np.arange(starts[part], ends[part]) for part in (*tree.prefix(last), last)]
        np.testing.assert_array_equal(np.concatenate(path), places[span])
    alone = {owner for place, owner in zip(places, np.repeat(batch.group_ids, batch.lengths()), strict=True)}
    for first, second in itertools.combinations(alone, 2):  # groups have nothing in common
        of_group = np.repeat(batch.group_ids, batch.lengths())
        assert not set(places[of_group == first]) & set(places[of_group == second])


def test_long_prefixes_are_shared_and_short_ones_are_not() -> None:
    prompt, turn = list(range(30)), list(range(50, 50 + MIN_SHARED_TOKENS))
    batch = grouped([[prompt + [1, 2], prompt + turn + [3], prompt + turn + [4, 5], prompt + turn]])
    tree, _ = prefix_tree(batch, np.arange(4))
    assert sorted(tree.lengths.tolist()) == [1, 2, 2, MIN_SHARED_TOKENS, 30]
    short = grouped([[prompt[: MIN_SHARED_TOKENS - 1] + [1], prompt[: MIN_SHARED_TOKENS - 1] + [2]]])
    assert not prefix_tree(short, np.arange(2))[0].shares


def test_prefixes_with_other_experts_are_not_shared() -> None:
    """With replayed routes a token's state depends on the experts of all tokens before it."""
    prompt = list(range(60))
    batch = grouped([[prompt + [1], prompt + [2, 3], prompt + [4]]])
    blocks = [np.zeros((length - 1, 2, 2), np.uint8) for length in batch.lengths()]
    blocks[2][40, 1, 0] = 1
    routes = tuple(Routes((RouteRows(block, 0, len(block)),)) for block in blocks)
    tree, places = prefix_tree(dataclasses.replace(batch, routes=routes), np.arange(3))
    first, _, third = (places[span] for span in batch.spans(np.arange(3)))
    assert (first == third)[:40].all() and not (first[40:] == third[40:]).any()
    assert tree.num_tokens == 40 + 20 + 1 + 2 + 21


def test_a_batch_shares_prefixes_only_if_that_saves_a_tenth() -> None:
    rng = np.random.default_rng(0)
    prompt = list(range(20))
    long = grouped([[prompt + rng.integers(0, VOCAB, 200).tolist() for _ in range(4)]])
    assert not with_shared_prefixes(long).shares_prefixes
    assert with_shared_prefixes(family_batch()).shares_prefixes
    dealer = SampleBalancer(ranks=1, max_tokens=4096, cost=SampleCost(1, 0), shares_prefixes=True)
    assert not dealer(dataclasses.replace(long, shares_prefixes=False))[0].shares_prefixes


@pytest.mark.parametrize("max_tokens", [60, 150, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 5, 12])
def test_balanced_parts_cover_the_batch_and_fit(ranks: int, max_tokens: int) -> None:
    batch = dataclasses.replace(family_batch(groups=5), shares_prefixes=False)
    cost = SampleCost(token=100, pair=1)
    sharing, whole = (
        SampleBalancer(ranks=ranks, max_tokens=max_tokens, cost=cost, shares_prefixes=shares)(batch)
        for shares in (True, False)
    )
    balanced, parts = sharing
    assert sorted(np.concatenate(parts).tolist()) == list(range(batch.num_samples))
    computed = 0
    for part in parts:
        shard = balanced.select(part)
        packed = pack_microbatches(
            shard, max_tokens=max_tokens, num_microbatches=count_microbatches(shard, max_tokens=max_tokens)
        )
        computed += sum(item.tree.num_tokens for item in packed if len(item.samples))
        assert all(len(item.samples) == 1 or item.tree.num_tokens <= max_tokens for item in packed)
    assert computed <= batch.num_tokens
    if ranks == 1 and max_tokens == 1000:
        assert balanced.shares_prefixes and computed < 0.6 * batch.num_tokens
    if ranks == 12 and max_tokens == 1000:  # whole groups would leave seven ranks idle
        assert max(len(part) for part in parts) < 4
    assert not whole[0].shares_prefixes


def test_replayed_routes_that_differ_do_not_overfill_a_microbatch() -> None:
    batch = grouped([[list(range(50)) + [n] for n in range(4)]])
    blocks = [np.full((length - 1, 1, 1), n, np.uint8) for n, length in enumerate(batch.lengths())]
    routes = tuple(Routes((RouteRows(block, 0, len(block)),)) for block in blocks)
    agreed = dataclasses.replace(batch, routes=routes, microbatches=np.zeros(4, np.int64))
    count = count_microbatches(agreed, max_tokens=110)
    packed = pack_microbatches(agreed, max_tokens=110, num_microbatches=count)
    assert all(item.tree.num_tokens <= 110 for item in packed)
    assert sorted(np.concatenate([item.samples for item in packed]).tolist()) == [0, 1, 2, 3]


def test_a_setting_that_the_model_cannot_follow_is_an_error() -> None:
    hf: dict[str, Any] = {"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4}
    with pytest.raises(ConfigError, match="delta nets"):
        shares_prefixes(TrainingSection(share_prefixes=True), hf)
    assert not shares_prefixes(TrainingSection(), hf)
    with pytest.raises(ValueError, match="cp = 2"):
        TrainingSection(share_prefixes=True, layout=LayoutSection(cp=2))


def both_ways(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], changes: dict[str, Any]
) -> dict[str, Any]:
    """Run passes over a batch with whole sequences and with shared prefixes; return the largest gaps."""
    still = scenarios.OptimizerSection(lr=1e-12, weight_decay=0.0)
    changes = {"microbatch_tokens": 120, "optimizer": still} | changes
    at = scenarios.worker(rank, world, port, folder, layout, **changes)
    batch = family_batch()
    shard = batch.select(np.flatnonzero(batch.group_ids % at.layout.dp == at.place.dp))
    if changes.get("replays"):
        shard = with_routes(shard, turned=1)
    whole, shared = (
        _passes(at, dataclasses.replace(shard, shares_prefixes=shares)) for shares in (False, True)
    )
    largest = max(float(gradient.abs().max()) for gradient in whole["gradients"].values())
    gaps = {
        name: float((gradient - shared["gradients"][name]).abs().max()) / largest
        for name, gradient in whole["gradients"].items()
    }
    return {
        "arrays": {name: float(abs(x - shared["arrays"][name]).max()) for name, x in whole["arrays"].items()},
        "gradient": max((gap, name) for name, gap in gaps.items()),
        "metrics": (whole["metrics"], shared["metrics"]),
        "computed": shared["tokens"] / whole["tokens"],
    }


def with_routes(batch: TrainBatch, *, turned: int) -> TrainBatch:
    """Return the batch with routes that are functions of the token and its place; those of sample `turned`
    differ from place 12 on."""
    samples = []
    for number, span in enumerate(batch.spans(np.arange(batch.num_samples))):
        places = np.arange(span.stop - span.start - 1)
        shift = 3 * (places >= 12) if number == turned else 0 * places
        first = (batch.tokens[span][:-1] + places + shift)[:, None] % 8
        rows = np.stack([first + layer for layer in range(4)], axis=1) % 8
        block = np.concatenate([rows, (rows + 1) % 8], axis=2).astype(np.uint8)
        samples.append(Routes((RouteRows(block, 0, len(block)),)))
    return dataclasses.replace(batch, routes=tuple(samples))


def _passes(at: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """Return forward()'s arrays and an update's, its metrics and gradients, and the computed tokens."""
    arrays = at.forward(batch, OPTIONS) or {}
    count = {"num_tokens": float(batch.loss_mask.sum())}
    metrics, trained = at.accumulate(batch, cross_entropy, count, OPTIONS)
    modules = at.policy.chunks.models
    gradients = {
        f"{number}.{name}": parameter.main_grad.clone()
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        # Sums over ranks are complete in the optimizer's shards alone. Elsewhere a rank has the sum of its
        # own tokens: with tp those of its share, which differ.
        if at.layout.tp == 1 or "experts" not in name or at.layout.ep > 1
    }
    limit = at.training.microbatch_tokens
    packed = pack_microbatches(
        batch, max_tokens=limit, num_microbatches=count_microbatches(batch, max_tokens=limit)
    )
    return {
        "arrays": arrays | {f"trained {name}": array for name, array in (trained or {}).items()},
        "metrics": metrics | at.step(),
        "gradients": gradients,
        "tokens": sum(len(item.tokens) for item in packed),
    }


def check(folder: Path, layout: dict[str, int], bound: float, **changes: Any) -> None:
    stand_ins = changes.pop("stand_ins", None)
    world = LayoutSection(**layout).world_size
    results = run_ranks(both_ways, world, str(folder), layout, changes, stand_ins=stand_ins)
    assert any(result["arrays"] for result in results)
    for result in results:
        assert result["computed"] < 0.75
        assert result["gradient"][0] < bound, result
        assert all(not gap >= 10 * bound for gap in result["arrays"].values()), result
        whole, shared = ({name: row[name] for name in ("loss", "grad_norm")} for row in result["metrics"])
        assert shared == pytest.approx(whole, rel=bound)


CASES: list[tuple[str, dict[str, int]]] = [
    ("qwen3_moe", {}),
    ("deepseek_v3", {"tp": 2}),
    ("gpt_oss", {"ep": 2, "dp": 2}),
    ("qwen3_moe", {"pp": 2, "vpp": 2}),
]
LONG_CASES: list[tuple[str, dict[str, int]]] = [
    ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}),
    ("deepseek_v3", {"pp": 2}),
    ("gpt_oss", {"tp": 2}),
    ("qwen2_moe", {"dp": 2, "ep": 2}),
    ("mixtral", {"tp": 2, "etp": 1, "ep": 2}),
]


@pytest.mark.integration
@pytest.mark.parametrize(("family", "layout"), CASES, ids=lambda v: v if isinstance(v, str) else name_of(v))
def test_log_probs_and_gradients(family: str, layout: dict[str, int], tmp_path: Path) -> None:
    check(write_model(tmp_path / "model", family), layout, 1e-6)


@pytest.mark.integration
def test_replayed_routes_end_a_prefix_where_they_differ(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe")
    check(folder, {}, 1e-6, replays=True)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "layout"), LONG_CASES, ids=lambda v: v if isinstance(v, str) else name_of(v)
)
def test_log_probs_and_gradients_of_more_layouts(family, layout, tmp_path: Path) -> None:
    check(write_model(tmp_path / "model", family), layout, 1e-6)


@pytest.mark.integration
@pytest.mark.parametrize("recompute", ["off", "selective", "full"])
def test_transformer_engine_takes_prefixes_by_its_mask(recompute: str, tmp_path: Path) -> None:
    changes = {"spec": "transformer_engine", "dtype": "bfloat16", "recompute": recompute}
    folder = write_model(tmp_path / "model", "qwen3")  # in bfloat16 near ties choose other experts
    check(folder, {}, 0.02, stand_ins=FOLDER, **changes)
