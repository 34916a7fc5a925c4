"""A step's amounts and its time from stated hardware numbers: to compare layouts by, not a promise.

Generation: decode steps, each bound by reading the weights its tokens touch and the KV cache, by arithmetic,
or by a least time. Training: operations over peak_flops x training_efficiency, lengthened by the pipeline's
bubble. Lengths are means: hardware.mean_response_fraction of the longest response, half a prompt.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from mrl.capacity.hardware import Hardware
from mrl.capacity.rollout_memory import EngineMemory
from mrl.config.root import Config
from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.training import TrainingSection
from mrl.models.facts import Facts
from mrl.models.layout import Layout

CallOfReference = Literal["none", "apart", "pass", "update"]
"""Which call the reference's pass is in: one of its own, that for old log-probs, or the update's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The samples, tokens and passes of one step."""

    samples: int
    prompt_tokens: float
    """Mean prompt: half of the longest."""
    response_tokens: float
    """Mean response: hardware.mean_response_fraction of the longest."""
    longest_response: int
    passes_before: int
    """Passes without gradient over all tokens before the updates: old log-probs where they need one, reference, values."""
    passes_in_updates: int
    """The same in the updates' calls: the reference's of an only update, and the teachers'."""
    reference: CallOfReference
    epochs: int
    """Passes with gradient over all tokens, the critic's counted too."""
    updates: int
    """Optimizer updates of one step, the critic's counted too."""

    @property
    def forward_passes(self) -> int:
        """All passes without gradient."""
        return self.passes_before + self.passes_in_updates

    @property
    def sample_tokens(self) -> float:
        """Tokens of a mean sample, prompt included."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.samples * self.sample_tokens


def work_of(config: Config, hardware: Hardware) -> Work:
    """The amounts of one step of a configuration."""
    longest, algorithm = config.rollout.max_response_tokens, config.algorithm
    trained_models = 1 + algorithm.needs_values
    taught, reference = algorithm.distillation is not None, _call_of_reference(config)
    return Work(
        samples=config.loop.prompts_per_step * config.loop.samples_per_prompt,
        prompt_tokens=min(config.data.max_prompt_tokens, config.model.max_length - longest) / 2,
        response_tokens=longest * hardware.mean_response_fraction,
        longest_response=longest,
        passes_before=algorithm.recomputes_policy + (reference in ("apart", "pass")) + algorithm.needs_values,
        passes_in_updates=(reference == "update") + taught * algorithm.epochs,
        reference=reference,
        epochs=trained_models * algorithm.epochs,
        updates=trained_models * algorithm.epochs * algorithm.minibatches,
    )


def _call_of_reference(config: Config) -> CallOfReference:
    if not config.algorithm.needs_reference:
        return "none"
    if config.routing.replay == "trainer":
        return "apart"
    return "update" if config.algorithm.reference_in_update else "pass"


def microbatches(config: Config, work: Work) -> tuple[int, int]:
    """(tokens of the largest microbatch, microbatches of one update on one data-parallel rank).

    A sample longer than microbatch_tokens is a microbatch of its own: the longest one bounds the memory.
    """
    longest = min(config.model.max_length, config.data.max_prompt_tokens + work.longest_response)
    tokens = max(config.training.microbatch_tokens, longest)
    per_rank = work.tokens / config.training.layout.dp / config.algorithm.minibatches
    typical = max(float(config.training.microbatch_tokens), work.sample_tokens)
    return tokens, max(1, math.ceil(per_rank / typical))


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """The share of a step of one engine, or of one of its dp ranks."""

    samples: int
    """Samples of the one that has most."""
    concurrent: int
    """Sequences decoded at one time (asked for, and that fit the KV cache at their mean length)."""
    decode_steps: int
    seconds: float


def generation(
    facts: Facts, hardware: Hardware, work: Work, config: Config, engine: EngineMemory
) -> Generation:
    """The share of the engine, or the dp rank, with the most samples."""
    rollout = config.rollout
    samples = -(-work.samples // (config.num_engines * rollout.dp))
    fitting = int(engine.kv_cache_tokens // max(1.0, work.sample_tokens))
    concurrent = max(1, min(samples, rollout.max_num_seqs, fitting))
    drain = work.longest_response - work.response_tokens  # the last responses end with few beside them
    steps = math.ceil(samples * work.response_tokens / concurrent + drain)
    step = _decode_step(facts, hardware, work, rollout, engine, concurrent)
    prefill = facts.forward_flops(work.prompt_tokens, work.prompt_tokens**2 / 2) / rollout.tp
    seconds = steps * step + samples * prefill / (hardware.peak_flops * hardware.training_efficiency)
    return Generation(samples=samples, concurrent=concurrent, decode_steps=steps, seconds=seconds)


def _decode_step(
    facts: Facts,
    hardware: Hardware,
    work: Work,
    rollout: RolloutSection,
    engine: EngineMemory,
    sequences: int,
) -> float:
    """Seconds of one decode step of so many sequences that are half through their mean length."""
    read = _weights_read(facts, engine.weights, rollout, sequences)
    read += sequences * (work.prompt_tokens + work.response_tokens / 2) * engine.kv_bytes_per_token
    flops = facts.forward_flops(sequences, sequences * work.sample_tokens) / rollout.tp
    return max(
        read / (hardware.memory_bytes_per_second * hardware.decode_efficiency),
        flops / (hardware.peak_flops * 0.5),
        hardware.decode_step_seconds,
    )


def _weights_read(facts: Facts, rank_weights: int, rollout: RolloutSection, sequences: int) -> float:
    """Bytes of weights one decode step reads: of experts, those that the engine's tokens chose (evenly)."""
    if not facts.num_experts:
        return rank_weights
    experts = facts.parameters_routed / rollout.ranks
    rest = (facts.parameters_total - facts.parameters_routed) / rollout.tp
    routed = rank_weights * experts / (experts + rest)
    touched = 1 - (1 - facts.top_k / facts.num_experts) ** (sequences * rollout.dp)
    return rank_weights - routed + routed * touched


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingTime:
    """Seconds of the trainer's phases."""

    log_probs: float
    update: float
    gradient_exchange: float
    """Reduce-scatter of gradients and all-gather of weights over data-parallel replicas, as if neither overlapped anything."""
    bubble: float
    """Share of the update in which a pipeline stage waits."""


def training_time(
    facts: Facts,
    hardware: Hardware,
    work: Work,
    layout: Layout,
    *,
    training: TrainingSection,
    num_microbatches: int,
    exchanged_bytes: float,
    resting_bytes: int,
) -> TrainingTime:
    """The times of one step; `exchanged_bytes` is what one rank sends for one optimizer update, `resting_bytes` the state that
    comes from its host's memory and goes back."""
    bubble = (layout.pp - 1) / (layout.vpp * num_microbatches + layout.pp - 1)
    efficiency = hardware.training_efficiency
    if hardware.kind == "gpu" and (training.spec == "local" or facts.family.own_attention):
        efficiency *= hardware.local_efficiency
    full_rate = layout.world_size * hardware.peak_flops * efficiency
    rate = full_rate * (1 - bubble)
    forward = facts.forward_flops(work.tokens, work.tokens * work.sample_tokens / 2)
    beside = work.reference in ("pass", "update")  # what it is beside fills and drains the pipeline
    factor = {"off": 3.0, "selective": 3.4, "full": 4.0}[training.recompute]
    crosses_nodes = layout.tp * layout.dp * layout.cp > hardware.gpus_per_node
    link = hardware.network_bytes_per_second if crosses_nodes else hardware.node_bytes_per_second
    return TrainingTime(
        log_probs=(work.forward_passes - beside) * forward / rate + beside * forward / full_rate,
        update=work.epochs * factor * forward / rate
        + work.updates * to_host_and_back(resting_bytes, hardware),
        gradient_exchange=work.updates * exchanged_bytes / (link * hardware.link_efficiency),
        bubble=bubble,
    )


def to_host_and_back(num_bytes: int, hardware: Hardware) -> float:
    """Seconds over a device's link to its host."""
    return 2 * num_bytes / (hardware.host_bytes_per_second * hardware.link_efficiency)
