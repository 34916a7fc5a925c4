"""Estimate the seconds of the trainer's phases.

Arithmetic: FLOPs over peak_flops and the share that training reaches (dense models or mixtures of experts).
Communication without overlap: experts' tokens to their ranks and back, and tp's gathers and sums along the
sequence. Both are lengthened by the pipeline bubble. The ring of context parallelism, which attention hides,
is not counted.
"""

from __future__ import annotations

import dataclasses

from mrl.capacity.hardware import Hardware
from mrl.capacity.step_time import Part, Work
from mrl.config.sections.training import TrainingSection
from mrl.models.facts import ModelSize
from mrl.models.layout import Layout
from mrl.resharding.planner.manifest import DTYPE_BYTES

LINK = ("link_efficiency",)


def efficiency_name(facts: ModelSize) -> str:
    """Return the assumption about the share of peak_flops that training this model reaches."""
    return "moe_efficiency" if facts.num_experts else "training_efficiency"


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingTime:
    """Seconds of the trainer's phases, by part."""

    log_probs: list[Part]
    update: list[Part]
    gradient_exchange: list[Part]
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
    tokens, pairs = work.computed(shares_prefixes=training.may_share_prefixes(delta_nets=facts.delta_nets))
    arithmetic = _arithmetic(facts, hardware, layout, training, facts.forward_flops(tokens, pairs))
    moved = [
        _expert_exchange(facts, hardware, layout, training, tokens),
        _tp_collectives(facts, hardware, layout, training, tokens),
    ]
    full = {"off": 3.0, "selective": 3.4, "full": 4.0}[training.recompute]
    sent = 2 if training.recompute == "off" else 3  # forward, backward, and forward again of experts
    forward = [part for part in (arithmetic, *moved) if part.seconds]
    update = [arithmetic.times(full), *(part.times(sent) for part in moved if part.seconds)]
    if training.drafts == "trained":
        update.append(_draft_head(facts, hardware, layout, training, tokens, pairs))
    drained = 0 if work.reference in ("pass", "update") else 1  # other passes already drain the pipeline
    passes = work.forward_passes - 1 + drained
    crosses_nodes = layout.tp * layout.dp * layout.cp > hardware.gpus_per_node
    link = hardware.network_bytes_per_second if crosses_nodes else hardware.node_bytes_per_second
    to_host = work.updates * to_host_and_back(resting_bytes, hardware)
    gradients = work.updates * exchanged_bytes / (link * hardware.link_efficiency)
    return TrainingTime(
        log_probs=[*(part.times(work.forward_passes) for part in forward), *_idle(forward, bubble, passes)],
        update=[
            *(part.times(work.epochs) for part in update),
            *_idle(update, bubble, work.epochs),
            *[Part("optimizer state to the host and back", to_host, LINK)] * (to_host > 0),
        ],
        gradient_exchange=[Part("gradients and weights between replicas", gradients, LINK)],
        bubble=bubble,
    )


def _idle(parts: list[Part], bubble: float, passes: float) -> list[Part]:
    """Return the seconds of these passes in which a stage waits for others."""
    seconds = passes * sum(part.seconds for part in parts) * bubble / (1 - bubble)
    return [Part("idle pipeline stages", seconds)] if seconds else []


def _arithmetic(
    facts: ModelSize, hardware: Hardware, layout: Layout, training: TrainingSection, flops: float
) -> Part:
    """Return the seconds of so many operations on all ranks."""
    names = (efficiency_name(facts),)
    rate = layout.world_size * hardware.peak_flops * getattr(hardware, names[0])
    if hardware.kind == "gpu" and (training.spec == "local" or facts.family.needs_own_attention):
        names, rate = (*names, "local_efficiency"), rate * hardware.local_efficiency
    return Part("arithmetic", flops / rate, names)


def _draft_head(
    facts: ModelSize,
    hardware: Hardware,
    layout: Layout,
    training: TrainingSection,
    tokens: float,
    pairs: float,
) -> Part:
    """Return the seconds of a draft head's forward and backward pass: a mean layer, a projection and the
    output layer, on the last pipeline stage, for which the others wait."""
    layer = facts.forward_flops(tokens, pairs, has_head=False) / facts.num_layers
    flops = layer + 2 * tokens * facts.hidden * (2 * facts.hidden + facts.vocab)
    part = _arithmetic(facts, hardware, layout, training, 3 * layout.pp * flops)
    return dataclasses.replace(part, name="draft head")


def _expert_exchange(
    facts: ModelSize, hardware: Hardware, layout: Layout, training: TrainingSection, tokens: float
) -> Part:
    """Return the seconds in which a pass sends each token to its experts' ranks and back, once per expert
    (Megatron's all-to-all). Ranks of ep are neighbours: those of the own node use its links."""
    name = "exchange of experts"
    if layout.ep == 1:
        return Part(name, 0.0)
    visits = facts.top_k * tokens / (layout.dp * layout.cp * layout.tp)
    size = 2 * visits * facts.hidden * DTYPE_BYTES[training.dtype] * facts.moe_layers / layout.pp
    near = min(layout.ep, max(1, hardware.gpus_per_node // layout.etp))
    inside = (near - 1) / layout.ep / hardware.node_bytes_per_second
    between = (1 - near / layout.ep) / hardware.network_bytes_per_second
    return Part(name, size * (inside + between) / hardware.link_efficiency, LINK)


def _tp_collectives(
    facts: ModelSize, hardware: Hardware, layout: Layout, training: TrainingSection, tokens: float
) -> Part:
    """Return the seconds of a pass's all-gathers and reduce-scatters along the sequence, a pair around each
    attention and each dense MLP; experts exchange tokens of the split sequence."""
    pairs = 2 * facts.num_layers - facts.moe_layers
    size = (
        2 * pairs / layout.pp * tokens / (layout.dp * layout.cp) * facts.hidden * DTYPE_BYTES[training.dtype]
    )
    spans = layout.tp > hardware.gpus_per_node
    link = hardware.network_bytes_per_second if spans else hardware.node_bytes_per_second
    seconds = size * (layout.tp - 1) / layout.tp / (link * hardware.link_efficiency)
    return Part("collectives of tp", seconds, LINK)


def to_host_and_back(num_bytes: int, hardware: Hardware) -> float:
    """Return the seconds over a device's link to its host and back."""
    return 2 * num_bytes / (hardware.host_bytes_per_second * hardware.link_efficiency)
