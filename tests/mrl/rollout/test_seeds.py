"""Seeds: no two samples of a run share one."""

import itertools
import random

import pytest

from mrl.errors import ConfigError
from mrl.rollout.seeds import _permute_32, request_id, sample_of, sample_seed, seed_of_request


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


def test_a_requests_name_has_its_sample_and_its_seed() -> None:
    """Validation prompts have negative indices, and seeds that no training prompt has."""
    assert sample_of(request_id(-3, 4)) == (-3, 4)
    assert seed_of_request(11, "4.1", 2) == sample_seed(11, 4, 1, 2)
    names = [request_id(prompt, 0) for prompt in range(-200, 200)]
    assert len({seed_of_request(11, name) for name in names}) == len(names)
