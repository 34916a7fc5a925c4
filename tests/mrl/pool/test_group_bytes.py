"""The buffer's limit covers a run's longest judged groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.pool.group_bytes import size_of
from mrl.pool.quota import admission_rule, max_buffer_bytes
from mrl.samples import Group, Prompt
from mrl.trajectories.group_messages import encode_group
from tests.mrl.loops.table_policy import config_of
from tests.support.samples import make_sample, verdict_of

PROMPTS = PromptStream([Prompt(0, np.zeros(1, np.int32), "", None)], seed=0)


def config(tmp_path: Path, *words: str) -> Config:
    return config_of(tmp_path, {}, "loop.schedule=stream", *words)


def a_group(config: Config) -> Group:
    """Return a group with the longest prompts and responses, four letters per token."""
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
    groups = admission_rule(given).slots
    size = groups * len(encode_group(a_group(given)))
    assert groups == 3 * 4 and size < max_buffer_bytes(given) < 2 * size
    assert groups * size_of(a_group(given)) < max_buffer_bytes(given), "in memory too"
