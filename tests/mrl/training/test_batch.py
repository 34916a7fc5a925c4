"""Packing and dealing: no sample is lost or repeated, and the order is restored."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.samples import Group, Prompt, ResponseSegment, Sample, Verdict, VerdictKind
from mrl.training.balance import SampleBalancer, SampleCost
from mrl.training.batch import first_versions, merge_parts, minibatches, pack, staleness_of
from tests.support.samples import make_batch, make_sample


def test_pack_puts_prompt_and_response_together_and_masks_the_prompt() -> None:
    batch = make_batch([(2, 3), (1, 1)])
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, True]
    assert (batch.arrays["rollout_logprobs"][~batch.loss_mask] == 0).all()
    assert (batch.arrays["rollout_logprobs"][batch.loss_mask] < 0).all()
    assert batch.group_ids.tolist() == [0, 0] and batch.sample_ids == ("0.0", "0.1")


def test_ages_lie_where_pack_puts_the_tokens() -> None:
    """Environment tokens have no version, so no staleness."""
    first, second = (
        dataclasses.replace(make_sample(0, i, num_prompt=2), policy_versions=np.full(3, 4 + i, np.int32))
        for i in range(2)
    )
    second = dataclasses.replace(second, loss_mask=np.array([True, False, True]))
    groups = [Group(Prompt(0, first.prompt_tokens, "", None), (first, second))]
    staleness = staleness_of(groups, version=6)
    assert staleness.tolist() == [0, 0, 2, 2, 2, 0, 0, 1, 0, 1] and staleness.dtype == np.float32


def test_a_token_is_of_the_version_that_began_its_response() -> None:
    began, whole = make_sample(0, 0, num_prompt=2), make_sample(0, 1, num_prompt=1)
    began = dataclasses.replace(began, policy_versions=np.array([3, 3, 4], np.int32))
    whole = dataclasses.replace(whole, policy_versions=np.full(3, 4, np.int32))
    groups = [Group(Prompt(0, began.prompt_tokens, "", None), (began, whole))]
    assert first_versions(groups).tolist() == [3] * 5 + [4] * 4


def test_pack_of_nothing_is_an_empty_batch() -> None:
    assert pack([]).num_samples == 0 and pack([]).num_tokens == 0
    assert len(staleness_of([], version=1)) == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=40), st.integers(1, 6))
def test_every_sample_is_dealt_out_once_and_merge_restores_the_order(lengths, parts) -> None:
    batch = make_batch(lengths)
    dealt, chosen = SampleBalancer(ranks=parts, max_tokens=50, cost=SampleCost(token=1, pair=0.1))(batch)
    assert len(chosen) == parts
    assert sorted(np.concatenate(chosen).tolist()) == list(range(batch.num_samples))
    shards = [dealt.select(c) for c in chosen]
    for positions, shard in zip(chosen, shards, strict=True):
        assert (shard.tokens == batch.tokens[batch.positions(positions)]).all()
        assert shard.lengths().tolist() == batch.lengths()[positions].tolist()
        assert shard.microbatches is not None and dealt.microbatches is not None
        assert shard.microbatches.tolist() == dealt.microbatches[positions].tolist()
    values = [shard.tokens.astype(np.float32) for shard in shards]
    assert (merge_parts(batch, chosen, values) == batch.tokens).all()


def test_all_samples_in_order_are_the_batch_itself() -> None:
    """One minibatch per step copies nothing."""
    batch = make_batch([(1, 2), (2, 1), (1, 1)])
    (all_of_it,) = minibatches(batch, 1)
    assert batch.select(all_of_it) is batch
    assert batch.select(all_of_it[::-1]).sample_ids == batch.sample_ids[::-1]
    assert batch.select(all_of_it[:0]).num_tokens == 0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=30), st.integers(1, 9))
def test_minibatches_keep_groups_whole(lengths: list[tuple[int, int]], count: int) -> None:
    batch = make_batch(lengths, group_size=3)
    pieces = minibatches(batch, count)
    assert np.concatenate(pieces).tolist() == list(range(batch.num_samples))
    assert all(len(p) for p in pieces)
    groups = [set(batch.group_ids[p].tolist()) for p in pieces]
    assert sum(len(g) for g in groups) == len(set().union(*groups))


def test_a_verdict_changes_nothing_else_of_a_sample() -> None:
    verdict = Verdict(VerdictKind.SCORED, 1.0)
    before = dataclasses.replace(
        make_sample(3, 1, num_prompt=2, length=4),
        segments=(ResponseSegment(0, 4, 7, 2, 0, 5),),
        tag="t",
        response_text="x",
    )
    after = before.with_verdict(verdict)
    names = {field.name for field in dataclasses.fields(Sample)} - {"verdict"}
    assert after.verdict is verdict and before.verdict is None
    assert all(getattr(after, name) is getattr(before, name) for name in names)
