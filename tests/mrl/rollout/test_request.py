"""Requests of a round and their seeds: no two samples of a run share one."""

import itertools
import random

import numpy as np
import pytest

from mrl.errors import ConfigError
from mrl.rollout.request import Round, Sampling, _permute_32, sample_of, sample_seed


def test_no_two_samples_share_a_seed_even_in_the_low_half() -> None:
    cases = list(itertools.product(range(400), range(64)))
    seeds = {sample_seed(7, prompt, sample) for prompt, sample in cases}
    assert len(seeds) == len(cases)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(cases)
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_attempts_far_prompts_and_run_seeds_differ() -> None:
    base = sample_seed(7, 3, 2)
    others = [
        sample_seed(7, 3, 2, attempt=1),
        sample_seed(7, 3 + (1 << 20), 2),
        sample_seed(7, 3, 2 + (1 << 12)),
        sample_seed(8, 3, 2),
    ]
    assert len({base, *others}) == 5
    assert base == sample_seed(7, 3, 2)


def test_the_low_half_is_a_permutation() -> None:
    rng = random.Random(0)
    keys = tuple(rng.getrandbits(32) for _ in range(4))
    values = rng.sample(range(1 << 32), 20000)
    assert len({_permute_32(value, keys) for value in values}) == len(values)


@pytest.mark.parametrize(
    "bad", [{"prompt_index": -1}, {"prompt_index": 1 << 37}, {"sample_index": 1 << 16}, {"attempt": 1024}]
)
def test_an_index_without_a_seed_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        sample_seed(0, **({"prompt_index": 0, "sample_index": 0} | bad))


def test_a_round_is_one_request_for_each_response() -> None:
    sampling = Sampling(
        num_samples=3, temperature=0.7, max_tokens=5, seed=11, top_p=0.9, top_k=40, min_p=0.05
    )
    tokens = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    wanted = Round(((4, tokens[0]), (-1, tokens[1])), sampling)
    requests = wanted.requests()
    assert len(wanted) == len(requests) == 6
    assert (
        [r.request_id for r in requests]
        == wanted.request_ids()
        == [f"{p}.{n}" for p in (4, -1) for n in range(3)]
    )
    assert [sample_of(r.request_id) for r in requests] == [(p, n) for p in (4, -1) for n in range(3)]
    assert all(r.prompt_tokens is tokens[i // 3] for i, r in enumerate(requests))
    assert {(r.temperature, r.max_tokens, r.greedy) for r in requests} == {(0.7, 5, False)}
    assert {(r.top_p, r.top_k, r.min_p) for r in requests} == {(0.9, 40, 0.05)}
    assert len({r.seed for r in requests}) == 6
    assert requests[1].seed == sample_seed(11, 4, 1)
    assert not any(r.ignore_stop for r in requests)


def test_a_response_of_a_given_length_runs_to_it_and_no_further_than_allowed() -> None:
    sampling = Sampling(2, 1.0, max_tokens=45, seed=1, lengths=lambda prompt, sample: 10 * prompt + sample)
    requests = Round(((4, np.ones(1, np.int32)), (5, np.ones(1, np.int32))), sampling).requests()
    assert [r.max_tokens for r in requests] == [40, 41, 45, 45]
    assert all(r.ignore_stop for r in requests)
