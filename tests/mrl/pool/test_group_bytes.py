"""What the judged groups of a run may come to, and their bytes in a checkpoint: nothing is lost or changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.errors import PoolError
from mrl.pool.group_bytes import decode_group, encode_group, size_of
from mrl.pool.room import admission_of, most_bytes
from mrl.samples import Group, Prompt
from tests.mrl.loops.table_policy import config_of
from tests.support.many_groups import assert_same, group_of, prompt_at
from tests.support.samples import make_sample, verdict_of

PROMPTS = PromptStream([Prompt(0, np.zeros(1, np.int32), "", None)], seed=0)


def config(tmp_path: Path, *words: str) -> Config:
    return config_of(tmp_path, {}, "loop.schedule=stream", *words)


def a_group(config: Config) -> Group:
    """One of longest prompts and responses, four letters a token."""
    length = config.rollout.max_response_tokens
    samples = (
        make_sample(
            0,
            number,
            num_prompt=config.model.max_length - length,
            length=length,
            response_text="word" * length,
            verdict=verdict_of(1.0),
        )
        for number in range(config.loop.samples_per_prompt)
    )
    return Group(PROMPTS.prompt_at(0), tuple(samples))


def test_what_groups_may_come_to_covers_longest_ones(tmp_path: Path) -> None:
    given = config(tmp_path, "rollout.max_response_tokens=500", "model.max_length=700", "stream.sync_every=2")
    groups = admission_of(given).slots
    size = groups * len(encode_group(a_group(given)))
    assert groups == 3 * 4 and size < most_bytes(given) < 2 * size
    assert groups * size_of(a_group(given)) < most_bytes(given), "in memory too"


def test_a_group_comes_back_as_it_was() -> None:
    for index in range(20):
        assert_same(decode_group(encode_group(group_of(index)), prompt_at), group_of(index))


def test_a_group_of_another_release_says_so() -> None:
    data = encode_group(group_of(1)).replace(b'"rollout_logprobs"', b'"sampler_logprobs"')
    with pytest.raises(PoolError, match=r"another release of mrl \('rollout_logprobs'\); finish the run"):
        decode_group(data, prompt_at)


def test_a_token_takes_about_eight_bytes() -> None:
    tokens = 20_000
    versions = np.repeat(np.arange(4, dtype=np.int32), tokens // 4)
    sample = make_sample(
        response_tokens=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.bool_),
        rollout_logprobs=np.zeros(tokens, np.float32),
        policy_versions=versions,
    )
    assert len(encode_group(Group(prompt_at(0), (sample,)))) < 8.1 * tokens
