"""The amounts of one step: samples, tokens, passes, microbatches."""

from __future__ import annotations

import dataclasses
import math

from mrl.capacity.hardware import Hardware
from mrl.config.root import Config


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One step's amounts."""

    samples: int
    prompt_tokens: float
    """Mean prompt: half of the longest."""
    response_tokens: float
    """Mean response: hardware.mean_response_fraction of the longest."""
    longest_response: int
    forward_passes: int
    """Passes without gradient over all tokens: old log-probs where they need one, reference, values."""
    epochs: int
    """Passes with gradient over all tokens, the critic's counted too."""
    updates: int
    """Optimizer updates of one step, the critic's counted too."""

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        return self.samples * self.sample_tokens


def work_of(config: Config, hardware: Hardware) -> Work:
    longest, algorithm = config.rollout.max_response_tokens, config.algorithm
    trained_models = 1 + algorithm.needs_values
    return Work(
        samples=config.loop.prompts_per_step * config.loop.samples_per_prompt,
        prompt_tokens=min(config.data.max_prompt_tokens, config.model.max_length - longest) / 2,
        response_tokens=longest * hardware.mean_response_fraction,
        longest_response=longest,
        forward_passes=algorithm.recomputes_policy + algorithm.needs_reference + algorithm.needs_values,
        epochs=trained_models * algorithm.epochs,
        updates=trained_models * algorithm.epochs * algorithm.minibatches,
    )


def microbatches(config: Config, work: Work) -> tuple[int, int]:
    """(tokens of the largest microbatch, microbatches of one update on one data-parallel rank).

    A sample longer than microbatch_tokens is a microbatch of its own, so that the longest sample bounds the memory.
    """
    longest = min(config.model.max_length, config.data.max_prompt_tokens + work.longest_response)
    tokens = max(config.training.microbatch_tokens, longest)
    per_rank = work.tokens / config.training.layout.dp / config.algorithm.minibatches
    typical = max(float(config.training.microbatch_tokens), work.sample_tokens)
    return tokens, max(1, math.ceil(per_rank / typical))
