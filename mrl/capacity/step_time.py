"""A step's time from stated hardware numbers: an estimate to compare layouts by, not a promise.

Generation: decode steps, each bound by reading the weights its tokens touch and the KV cache, by arithmetic, or by a least
time. Training: operations over peak_flops x training_efficiency, lengthened by the pipeline's bubble. Lengths are means:
hardware.mean_response_fraction of the longest response, half of the longest prompt.
"""

from __future__ import annotations

import dataclasses
import math

from mrl.capacity.hardware import Hardware
from mrl.capacity.step_workload import Work
from mrl.models.facts import Facts


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One engine's share of a step."""

    concurrent: int
    """Sequences decoded at one time (asked for, and that fit the KV cache at their mean length)."""
    decode_steps: int
    seconds: float


def generation(
    facts: Facts,
    hardware: Hardware,
    work: Work,
    *,
    engines: int,
    tp: int,
    max_num_seqs: int,
    cache_tokens: int,
    rank_weights: int,
    kv_bytes_per_token: int,
) -> Generation:
    """Of the engine with the most samples. `rank_weights` and `kv_bytes_per_token` are of one engine rank."""
    samples = -(-work.samples // engines)
    concurrent = max(1, min(samples, max_num_seqs, int(cache_tokens // max(1.0, work.sample_tokens))))
    steps = max(work.longest_response, math.ceil(samples * work.response_tokens / concurrent))
    read = _weights_read(facts, rank_weights, concurrent)
    read += concurrent * (work.prompt_tokens + work.response_tokens / 2) * kv_bytes_per_token
    reading = read / (hardware.memory_bytes_per_second * hardware.decode_efficiency)
    computing = (
        facts.forward_flops(concurrent, concurrent * work.sample_tokens) / tp / (hardware.peak_flops * 0.5)
    )
    step = max(reading, computing, hardware.decode_step_seconds)
    prefill = facts.forward_flops(samples * work.prompt_tokens, samples * work.prompt_tokens**2 / 2) / tp
    seconds = steps * step + prefill / (hardware.peak_flops * hardware.training_efficiency)
    return Generation(concurrent=concurrent, decode_steps=steps, seconds=seconds)


def _weights_read(facts: Facts, rank_weights: int, tokens: int) -> float:
    """Bytes of weights one decode step reads: experts that no token chose are not read (choices taken as even)."""
    if not facts.num_experts:
        return rank_weights
    routed = rank_weights * facts.parameters_routed / facts.parameters_total
    touched = 1 - (1 - facts.top_k / facts.num_experts) ** tokens
    return rank_weights - routed + routed * touched


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """Seconds of the trainer's phases."""

    log_probs: float
    update: float
    gradient_exchange: float
    """Reduce-scatter of gradients and all-gather of weights over data-parallel replicas, without overlap."""
    bubble: float
    """Share of the update in which a pipeline stage waits."""


def training_time(
    facts: Facts,
    hardware: Hardware,
    work: Work,
    *,
    world_size: int,
    pp: int,
    vpp: int,
    num_microbatches: int,
    recompute: str,
    exchanged_bytes: float,
    crosses_nodes: bool,
) -> Training:
    """Of one step; `exchanged_bytes` is what one rank sends for one optimizer update."""
    bubble = (pp - 1) / (vpp * num_microbatches + pp - 1)
    rate = world_size * hardware.peak_flops * hardware.training_efficiency * (1 - bubble)
    forward = facts.forward_flops(work.tokens, work.tokens * work.sample_tokens / 2)
    factor = {"off": 3.0, "selective": 3.4, "full": 4.0}[recompute]
    link = hardware.network_bytes_per_second if crosses_nodes else hardware.node_bytes_per_second
    return Training(
        log_probs=work.forward_passes * forward / rate,
        update=work.epochs * factor * forward / rate,
        gradient_exchange=work.updates * exchanged_bytes / (link * hardware.link_efficiency),
        bubble=bubble,
    )
