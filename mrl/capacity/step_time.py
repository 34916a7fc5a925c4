"""Estimate a step's amounts and time from stated hardware numbers: to compare layouts, not as a promise.

Generation: decode steps, each limited by reading the touched weights and the KV cache, by arithmetic, or by a
shortest time. Training: FLOPs over peak_flops x training_efficiency, lengthened by the pipeline bubble.
Lengths are means: hardware.mean_response_fraction of the longest response, half a prompt.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from mrl.capacity.hardware import Hardware
from mrl.capacity.rollout_memory import EngineMemory
from mrl.config.root import Config
from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.training import MIN_PREFIX_SAVING, TrainingSection
from mrl.models.facts import ModelSize
from mrl.models.layout import Layout

ReferencePass = Literal["none", "apart", "pass", "update"]
"""Call that contains the reference's pass: its own, that for old log-probs, or the update's."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """Share of a step of one engine, or of one of its dp ranks."""

    samples: int
    """Samples of the one that has most."""
    concurrent: int
    """Sequences decoded at a time (at most max_num_seqs, and as many as fit the KV cache at mean length)."""
    decode_steps: int
    seconds: float


def generation(
    facts: ModelSize, hardware: Hardware, work: Work, config: Config, engine: EngineMemory
) -> Generation:
    """Return the share of the engine, or the dp rank, with the most samples."""
    rollout = config.rollout
    samples = -(-work.samples // (config.num_engines * rollout.dp))
    fitting = int(engine.kv_cache_tokens // max(1.0, work.sample_tokens))
    concurrent = max(1, min(samples, rollout.max_num_seqs, fitting))
    drain = work.longest_response - work.response_tokens  # the longest responses end almost alone
    steps = math.ceil(samples * work.response_tokens / concurrent + drain)
    step = _decode_step(facts, hardware, work, rollout, engine, concurrent)
    prefill = facts.forward_flops(work.prompt_tokens, work.prompt_tokens**2 / 2) / rollout.tp
    seconds = steps * step + samples * prefill / (hardware.peak_flops * hardware.training_efficiency)
    return Generation(samples=samples, concurrent=concurrent, decode_steps=steps, seconds=seconds)


def _decode_step(
    facts: ModelSize,
    hardware: Hardware,
    work: Work,
    rollout: RolloutSection,
    engine: EngineMemory,
    sequences: int,
) -> float:
    """Return the seconds of one decode step of so many sequences at half their mean length."""
    read = _weights_read(facts, engine.weights, rollout, sequences)
    read += sequences * (work.prompt_tokens + work.response_tokens / 2) * engine.kv_bytes_per_token
    flops = facts.forward_flops(sequences, sequences * work.sample_tokens) / rollout.tp
    return max(
        read / (hardware.memory_bytes_per_second * hardware.decode_efficiency),
        flops / (hardware.peak_flops * 0.5),
        hardware.decode_step_seconds,
    )


def _weights_read(facts: ModelSize, rank_weights: int, rollout: RolloutSection, sequences: int) -> float:
    """Return the bytes of weights that one decode step reads, of experts only those chosen (evenly)."""
    if not facts.num_experts:
        return rank_weights
    experts = facts.parameters_routed / rollout.ranks
    others = (facts.parameters_total - facts.parameters_routed) / rollout.tp
    routed = rank_weights * experts / (experts + others)
    touched = 1 - (1 - facts.top_k / facts.num_experts) ** (sequences * rollout.dp)
    return rank_weights - routed + routed * touched


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingTime:
    """Seconds of the trainer's phases."""

    log_probs: float
    update: float
    gradient_exchange: float
    """Reduce-scatter of gradients and all-gather of weights over data-parallel replicas, without overlap."""
    bubble: float
    """Share of the update in which a pipeline stage waits."""


def training_time(
    facts: ModelSize,
    hardware: Hardware,
    work: Work,
    layout: Layout,
    *,
    training: TrainingSection,
    num_microbatches: int,
    exchanged_bytes: float,
    resting_bytes: int,
) -> TrainingTime:
    """Return the times of one step.

    Args:
        exchanged_bytes: Bytes that one rank sends per optimizer update.
        resting_bytes: Optimizer state that moves from host memory and back.
    """
    bubble = (layout.pp - 1) / (layout.vpp * num_microbatches + layout.pp - 1)
    efficiency = hardware.training_efficiency
    if hardware.kind == "gpu" and (training.spec == "local" or facts.family.needs_own_attention):
        efficiency *= hardware.local_efficiency
    full_rate = layout.world_size * hardware.peak_flops * efficiency
    rate = full_rate * (1 - bubble)
    shares = training.may_share_prefixes(delta_nets=facts.delta_nets)
    forward = facts.forward_flops(*work.computed(shares_prefixes=shares))
    no_bubble = work.reference in ("pass", "update")  # the other passes already fill and drain the pipeline
    factor = {"off": 3.0, "selective": 3.4, "full": 4.0}[training.recompute]
    crosses_nodes = layout.tp * layout.dp * layout.cp > hardware.gpus_per_node
    link = hardware.network_bytes_per_second if crosses_nodes else hardware.node_bytes_per_second
    return TrainingTime(
        log_probs=(work.forward_passes - no_bubble) * forward / rate + no_bubble * forward / full_rate,
        update=work.epochs * factor * forward / rate
        + work.updates * to_host_and_back(resting_bytes, hardware),
        gradient_exchange=work.updates * exchanged_bytes / (link * hardware.link_efficiency),
        bubble=bubble,
    )


def to_host_and_back(num_bytes: int, hardware: Hardware) -> float:
    """Return the seconds over a device's link to its host and back."""
    return 2 * num_bytes / (hardware.host_bytes_per_second * hardware.link_efficiency)
