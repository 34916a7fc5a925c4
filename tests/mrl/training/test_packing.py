"""Microbatches cover every sample once, respect the limit and never split a segment."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.models.kernels.zigzag import token_multiple
from mrl.training.packing import count_microbatches, pack_microbatches, pack_samples, split_samples
from mrl.training.router_loads import prefix_minimum
from tests.tiny_models import batch_of_tokens, random_batch


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 80))
@settings(max_examples=100, deadline=None)
def test_split_covers_every_sample_once(lengths: list[int], limit: int) -> None:
    parts = split_samples(np.asarray(lengths, np.int64), max_tokens=limit)
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[i] for i in part) <= limit


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (2, 3)])
def test_pack_keeps_tokens_in_their_places(tp: int, cp: int) -> None:
    batch = random_batch(9, seed=3)
    needed = count_microbatches(batch, max_tokens=50, cp=cp)
    packed = pack_microbatches(batch, max_tokens=50, num_microbatches=needed + 1, tp=tp, cp=cp)
    assert len(packed) == needed + 1
    assert len(packed[-1].token_index) == 0 and len(packed[-1].tokens) >= 1
    seen = np.concatenate([item.token_index for item in packed])
    assert sorted(seen.tolist()) == list(range(batch.num_tokens))
    for item in packed:
        assert item.tree.num_tokens == len(item.tokens) and len(item.tokens) % (tp * cp) == 0
        assert len(item.tokens) <= 50 + token_multiple(tp=tp, cp=cp)
        assert cp == 1 or (item.tree.lengths % (2 * cp) == 0).all()
        np.testing.assert_array_equal(item.tokens[item.places], batch.tokens[item.token_index])
        assert not np.delete(item.tokens, item.places).any()


def test_microbatch_follows_the_given_order() -> None:
    batch = random_batch(4, seed=0)
    item = pack_samples(batch, np.array([2, 0]))
    second, first = (batch.tokens[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]] for i in (2, 0))
    np.testing.assert_array_equal(item.tokens, np.concatenate([second, first]))


def test_prefix_minimum_by_loops() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 20)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.random(bounds[-1])
    expected = [
        0.0 if t == start else values[start:t].min()
        for start, end in itertools.pairwise(bounds)
        for t in range(start, end)
    ]
    np.testing.assert_array_equal(prefix_minimum(values, bounds), expected)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=40), st.integers(1, 80), st.sampled_from([1, 2]))
@settings(max_examples=50, deadline=None)
def test_groups_that_are_kept_whole_lie_in_one_microbatch_in_their_order(lengths, limit, cp) -> None:
    lengths = lengths[: len(lengths) // 2 * 2]
    batch = dataclasses.replace(
        batch_of_tokens([[1] * n for n in lengths]),
        group_ids=np.repeat(np.arange(len(lengths) // 2), 2),
        whole_groups=True,
    )
    needed = count_microbatches(batch, max_tokens=limit, cp=cp)
    packed = pack_microbatches(batch, max_tokens=limit, num_microbatches=needed, cp=cp)
    for item in packed:
        assert (item.samples[0::2] % 2 == 0).all() and (item.samples[1::2] == item.samples[0::2] + 1).all()
    assert sorted(np.concatenate([item.samples for item in packed]).tolist()) == list(range(len(lengths)))
