"""Count a step's samples, tokens and passes; the times of them are in decode_time.py and training_time.py.

Lengths are means: hardware.mean_response_fraction of the longest response, half a prompt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from mrl.capacity.hardware import Hardware
from mrl.config.root import Config
from mrl.config.sections.training import MIN_PREFIX_SAVING
from mrl.models.facts import ModelSize

ReferencePass = Literal["none", "apart", "pass", "update"]
"""Call that contains the reference's pass: its own, that for old log-probs, or the update's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Part of a phase's seconds."""

    name: str
    seconds: float
    assumptions: tuple[str, ...] = ()
    """Fields of the hardware that the seconds rest on besides vendors' figures."""

    def times(self, factor: float) -> Part:
        """Return the part, this many times as long."""
        return dataclasses.replace(self, seconds=self.seconds * factor)


def sum_by_name(parts: Iterable[Part]) -> list[Part]:
    """Return one part per name, with the sum of its seconds."""
    sums: dict[str, Part] = {}
    for part in parts:
        earlier = sums.get(part.name, Part(part.name, 0.0))
        names = dict.fromkeys(earlier.assumptions + part.assumptions)
        sums[part.name] = Part(part.name, earlier.seconds + part.seconds, tuple(names))
    return list(sums.values())


def total(parts: Iterable[Part]) -> float:
    """Return the seconds of all parts."""
    return sum(part.seconds for part in parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Samples, tokens and passes of one step."""

    samples: int
    samples_per_prompt: int
    prompt_tokens: float
    """Mean prompt: half of the longest."""
    response_tokens: float
    """Mean response: hardware.mean_response_fraction of the longest."""
    longest_response: int
    passes_before: int
    """Passes without gradient over all tokens before the updates: old log-probs, reference, values."""
    passes_in_updates: int
    """Passes without gradient in the updates' calls: the reference's in an only update, the teachers'."""
    reference: ReferencePass
    epochs: int
    """Passes with gradient over all tokens, including the critic's."""
    updates: int
    """Optimizer updates of one step, including the critic's."""

    @property
    def forward_passes(self) -> int:
        """Number of passes without gradient."""
        return self.passes_before + self.passes_in_updates

    @property
    def sample_tokens(self) -> float:
        """Tokens of a mean sample, including the prompt."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.samples * self.sample_tokens

    def computed(self, *, shares_prefixes: bool) -> tuple[float, float]:
        """Return the tokens that a pass of the trainer computes, and attention's pairs of them."""
        pairs = self.tokens * self.sample_tokens / 2
        saved = (self.samples - self.samples / self.samples_per_prompt) * self.prompt_tokens
        if not shares_prefixes or saved < MIN_PREFIX_SAVING * self.tokens:
            return self.tokens, pairs
        return self.tokens - saved, pairs - saved * self.prompt_tokens / 2


def work_of(config: Config, hardware: Hardware) -> Work:
    """Return the amounts of one step of a configuration."""
    longest, algorithm = config.rollout.max_response_tokens, config.algorithm
    trained_models = 1 + algorithm.needs_values
    taught, reference = algorithm.distillation is not None, _call_of_reference(config)
    return Work(
        samples=config.loop.prompts_per_step * config.loop.samples_per_prompt,
        samples_per_prompt=config.loop.samples_per_prompt,
        prompt_tokens=min(config.data.max_prompt_tokens, config.model.max_length - longest) / 2,
        response_tokens=longest * hardware.mean_response_fraction,
        longest_response=longest,
        passes_before=algorithm.recomputes_policy + (reference in ("apart", "pass")) + algorithm.needs_values,
        passes_in_updates=(reference == "update") + taught * algorithm.epochs,
        reference=reference,
        epochs=trained_models * algorithm.epochs,
        updates=trained_models * algorithm.epochs * algorithm.minibatches,
    )


def _call_of_reference(config: Config) -> ReferencePass:
    if not config.algorithm.needs_reference:
        return "none"
    if config.routing.replay == "trainer":
        return "apart"
    return "update" if config.algorithm.reference_in_update else "pass"


def microbatches(config: Config, work: Work, facts: ModelSize) -> tuple[int, int]:
    """Return (tokens of the largest micro-batch, micro-batches per update and data-parallel rank).

    A sample longer than microbatch_tokens is a micro-batch of its own, so the longest one limits the memory;
    so does a rank's whole share of an update.
    """
    longest = min(config.model.max_length, config.data.max_prompt_tokens + work.longest_response)
    updates = min(config.algorithm.minibatches, config.loop.prompts_per_step)
    share = math.ceil(work.samples / (config.training.layout.dp * updates)) * longest
    tokens = max(min(config.training.microbatch_tokens, share), longest)
    shares = config.training.may_share_prefixes(delta_nets=facts.delta_nets)
    computed, _ = work.computed(shares_prefixes=shares)
    per_rank = computed / config.training.layout.dp / config.algorithm.minibatches
    typical = max(float(config.training.microbatch_tokens), work.sample_tokens)
    return tokens, max(1, math.ceil(per_rank / typical))
