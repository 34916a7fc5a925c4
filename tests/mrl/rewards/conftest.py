"""Shared data and samples for the verifiers' tests. Missing data fails, and never skips."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mrl.rewards.pool.reward_pool import RewardPool
from mrl.samples import Prompt, Sample, Status, Verdict

Pair = tuple[Sample, Prompt]


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    """Build the (sample, prompt) of a response and its ground truth."""

    def make(index: int, response: str, ground_truth: Any, **fields: Any) -> Pair:
        position = fields.pop("sample_index", 0)
        status = fields.pop("status", Status.FINISHED)
        num_tokens = fields.pop("num_tokens", 3)
        prompt = Prompt(
            index=index,
            tokens=np.zeros(1, np.int32),
            text="question",
            ground_truth=ground_truth,
            row=f"rows:{index}",
        )
        prompt = dataclasses.replace(prompt, **fields)
        sample = Sample(
            prompt_index=index,
            sample_index=position,
            prompt_tokens=prompt.tokens,
            response_tokens=np.zeros(num_tokens, np.int32),
            loss_mask=np.ones(num_tokens, bool),
            rollout_logprobs=np.zeros(num_tokens, np.float32),
            policy_versions=np.zeros(num_tokens, np.int32),
            status=status,
            response_text=response,
            domain=prompt.domain,
        )
        return sample, prompt

    return make


@pytest.fixture
def score_all() -> Callable[[RewardPool, Sequence[Pair]], dict[str, Verdict]]:
    """Submit all pairs and wait for all verdicts, with a deadline."""

    def run(pool: RewardPool, pairs: Sequence[Pair], *, seconds: float = 90.0) -> dict[str, Verdict]:
        return pool.score_all(pairs, deadline_seconds=seconds)

    return run
