"""Estimate the seconds of generation.

A decode step reads the weights that its tokens touch and their KV cache (or is limited by arithmetic, or by
launches), sums over tp in every layer, and with dp exchanges all tokens around each layer of experts (vLLM's
default: an all-gather and a reduce-scatter). The longest responses end almost alone.
"""

from __future__ import annotations

import dataclasses
import math

from mrl.capacity.hardware import Hardware
from mrl.capacity.rollout_memory import EngineMemory
from mrl.capacity.step_time import Part, Work, sum_by_name, total
from mrl.capacity.training_time import efficiency_name
from mrl.config.root import Config
from mrl.config.sections.rollout import RolloutSection
from mrl.models.facts import ModelSize
from mrl.resharding.planner.manifest import DTYPE_BYTES

RING = ("collective_seconds", "node_hop_seconds", "network_hop_seconds", "link_efficiency")
"""Assumptions about a ring collective."""


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """Share of a step of one engine, or of one of its dp ranks."""

    samples: int
    """Samples of the one that has most."""
    concurrent: int
    """Sequences decoded at a time (at most max_num_seqs, and as many as fit the KV cache at mean length)."""
    decode_steps: int
    step_seconds: float
    """Seconds of one decode step of all concurrent sequences."""
    parts: list[Part]


def generation(
    facts: ModelSize, hardware: Hardware, work: Work, config: Config, engine: EngineMemory
) -> Generation:
    """Return the share of the engine, or the dp rank, with the most samples."""
    rollout = config.rollout
    samples = -(-work.samples // (config.num_engines * rollout.dp))
    fitting = int(engine.kv_cache_tokens // max(1.0, work.sample_tokens))
    concurrent = max(1, min(samples, rollout.max_num_seqs, fitting))
    full_steps = samples * work.response_tokens / concurrent
    drain = work.longest_response - work.response_tokens
    step, last = (
        _decode_step(facts, hardware, work, rollout, engine, sequences) for sequences in (concurrent, 1)
    )
    name = efficiency_name(facts)
    flops = samples * facts.forward_flops(work.prompt_tokens, work.prompt_tokens**2 / 2) / rollout.tp
    prefill = Part("prefill", flops / (hardware.peak_flops * getattr(hardware, name)), (name,))
    return Generation(
        samples=samples,
        concurrent=concurrent,
        decode_steps=math.ceil(full_steps + drain),
        step_seconds=total(step),
        parts=sum_by_name(
            [*(part.times(full_steps) for part in step), *(part.times(drain) for part in last), prefill]
        ),
    )


def _decode_step(
    facts: ModelSize,
    hardware: Hardware,
    work: Work,
    rollout: RolloutSection,
    engine: EngineMemory,
    sequences: int,
) -> list[Part]:
    """Return the parts of one decode step of so many sequences at half their mean length."""
    read = _weights_read(facts, engine.weights, rollout, sequences)
    read += sequences * (work.prompt_tokens + work.response_tokens / 2) * engine.kv_bytes_per_token
    flops = facts.forward_flops(sequences, sequences * work.sample_tokens) / rollout.tp
    limits = [
        Part(
            "reading weights and KV cache",
            read / (hardware.memory_bytes_per_second * hardware.decode_efficiency),
            ("decode_efficiency",),
        ),
        Part(
            "arithmetic",
            flops / (hardware.peak_flops * hardware.decode_flops_efficiency),
            ("decode_flops_efficiency",),
        ),
        Part("shortest steps", hardware.decode_step_seconds, ("decode_step_seconds",)),
    ]
    longest = max(limits, key=lambda part: part.seconds)
    return [
        longest,
        *_all_reduces(facts, hardware, rollout, sequences),
        *_exchange(facts, hardware, rollout, sequences),
    ]


def _all_reduces(facts: ModelSize, hardware: Hardware, rollout: RolloutSection, sequences: int) -> list[Part]:
    """Return the all-reduces of tp after each layer's attention and, unless dp exchanges them, experts."""
    if rollout.tp == 1:
        return []
    count = 2 * facts.num_layers - facts.moe_layers * (rollout.dp > 1)
    size = sequences * facts.hidden * DTYPE_BYTES[rollout.dtype]
    if rollout.tp <= hardware.gpus_per_node:
        seconds = hardware.all_reduce_seconds + size / hardware.all_reduce_bytes_per_second
        return [
            Part("all-reduces of tp", count * seconds, ("all_reduce_seconds", "all_reduce_bytes_per_second"))
        ]
    seconds = 2 * _ring_seconds(hardware, rollout.tp, size)
    return [Part("all-reduces of tp", count * seconds, RING)]


def _exchange(facts: ModelSize, hardware: Hardware, rollout: RolloutSection, sequences: int) -> list[Part]:
    """Return what dp ranks exchange: tokens before and after each layer of experts, and their agreement."""
    if rollout.dp == 1:
        return []
    spans = rollout.ranks > hardware.gpus_per_node
    size = rollout.dp * sequences * facts.hidden * DTYPE_BYTES[rollout.dtype]
    seconds = 2 * facts.moe_layers * _ring_seconds(hardware, rollout.ranks, size)
    agreement = "dp_step_network_seconds" if spans else "dp_step_seconds"
    return [
        Part("exchange of experts", seconds, RING),
        Part("agreement of dp ranks", getattr(hardware, agreement), (agreement,)),
    ]


def _ring_seconds(hardware: Hardware, ranks: int, size: int) -> float:
    """Return the seconds of an all-gather to `size` bytes, or a reduce-scatter of them, over a ring.

    NCCL's cost model (src/graph/tuning.cc): one hop per rank but the first. Each node's cards share the bytes
    that it receives from the other nodes.
    """
    nodes = -(-ranks // hardware.gpus_per_node)
    hops = (ranks - nodes) * hardware.node_hop_seconds + (nodes - 1) * hardware.network_hop_seconds
    inside = size * (ranks - 1) / ranks / hardware.node_bytes_per_second
    between = size * (nodes - 1) / ranks / hardware.network_bytes_per_second
    return hardware.collective_seconds + hops + max(inside, between) / hardware.link_efficiency


def _weights_read(facts: ModelSize, rank_weights: int, rollout: RolloutSection, sequences: int) -> float:
    """Return the bytes of weights that one decode step reads, of experts only those chosen (evenly)."""
    if not facts.num_experts:
        return rank_weights
    experts = facts.parameters_routed / rollout.ranks
    others = (facts.parameters_total - facts.parameters_routed) / rollout.tp
    routed = rank_weights * experts / (experts + others)
    touched = 1 - (1 - facts.top_k / facts.num_experts) ** (sequences * rollout.dp)
    return rank_weights - routed + routed * touched
