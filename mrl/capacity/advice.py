"""Warnings and suggestions: what does not divide, does not fit, or would be better otherwise. Each names what to change."""

from __future__ import annotations

import dataclasses

from mrl.capacity.hardware import Hardware
from mrl.capacity.memory_timeline import Moment, SlotMemory
from mrl.capacity.traffic import Traffic
from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.training import TrainingSection
from mrl.models.facts import Facts
from mrl.models.layout import Layout

FULL_SHARE = 0.08
"""Free share of the device below which a moment is called tight."""
SMALL_OFF_RAIL = 0.05
"""Share of the bytes between nodes that may leave their rail unmentioned (attention and embeddings mostly do)."""
SMALL_SLICE = 256
"""Inner width of an expert's slice below which its matrix products are called too small."""


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """What people are told. `errors` make the plan not fit."""

    errors: list[str]
    warnings: list[str]
    suggestions: list[str]


def layout_warnings(
    facts: Facts, layout: Layout, training: TrainingSection, rollout: RolloutSection, hardware: Hardware
) -> list[str]:
    """What works and is probably not what one wants."""
    node = hardware.gpus_per_node
    found = []
    if facts.num_layers % (layout.pp * layout.vpp):
        found.append(
            f"{facts.num_layers} layers do not divide into pp x vpp = {layout.pp} x {layout.vpp}: the first stages hold "
            "one layer more, the others wait for them"
        )
    if facts.vocab % layout.tp:
        found.append(
            f"the vocabulary ({facts.vocab}) does not divide into training.layout.tp = {layout.tp}: it is padded"
        )
    for name, size in (("training.layout.tp", layout.tp), ("training.layout.tp x cp", layout.tp * layout.cp)):
        if size > node:
            found.append(
                f"{name} = {size} spans nodes of {node}: its collectives run on the network in every layer"
            )
            break
    if layout.world_size > node and layout.world_size % node:
        found.append(f"the world of {layout.world_size} does not fill nodes of {node}")
    if not facts.latent_attention and layout.tp > facts.kv_heads:
        found.append(
            f"training.layout.tp = {layout.tp} is above the {facts.kv_heads} key and value heads: query groups are cut, and "
            "every group's weights arrive in pieces"
        )
    return found + _expert_warnings(facts, training, rollout)


def _expert_warnings(facts: Facts, training: TrainingSection, rollout: RolloutSection) -> list[str]:
    if not facts.num_experts:
        return []
    found = []
    inner = facts.expert_inner
    if (
        rollout.tp > 1
        and not rollout.expert_parallel
        and facts.num_experts % rollout.tp == 0
        and inner // rollout.tp < SMALL_SLICE
    ):
        found.append(
            f"the engines cut each expert's inner width of {inner} into {rollout.tp} slices of {inner // rollout.tp}: small matrix "
            "products, and every slice comes from every rank; rollout.expert_parallel=true deals out whole experts"
        )
    if training.router_aux_loss:
        found.append(
            f"training.router_aux_loss = {training.router_aux_loss:g}: under RL the balance loss pulls against the reward; "
            "usual is 0 with a watch on moe/load_max_over_mean_max and moe/load_entropy_min"
        )
    return found


def traffic_warnings(moved: Traffic) -> list[str]:
    """Bytes that leave their rail."""
    share = moved.off_rail / max(1, sum(moved.network_in))
    if share < SMALL_OFF_RAIL:
        return []
    return [
        f"rail misalignment: {share:.0%} of the bytes between nodes have no holder on the receiver's rail and cross to "
        "another; training.layout.ep (tp) equal to rollout.tp keeps experts (the rest) on it"
    ]


def cache_warnings(concurrent: int, samples: int, rollout: RolloutSection) -> list[str]:
    """An engine that can decode only a part of its samples at once."""
    wanted = min(samples, rollout.max_num_seqs)
    if concurrent >= wanted:
        return []
    return [
        f"the KV cache holds {concurrent} sequences of mean length, an engine has {samples} and may run {rollout.max_num_seqs}: "
        "more device memory, a larger rollout.tp or gpu_memory_utilization, or shorter responses make generation faster"
    ]


def memory_errors(all_moments: list[Moment], hardware: Hardware) -> list[str]:
    """Moments that do not fit."""
    return [
        f"'{moment.name}' needs {_gb(moment.total)} of {_gb(hardware.memory_bytes)}: {_gb(-moment.free)} too much "
        f"({', '.join(f'{part} {_gb(size)}' for part, size in moment.parts.items())})"
        for moment in all_moments
        if moment.free < 0
    ]


def host_errors(slot: SlotMemory, hardware: Hardware, *, offloads: bool, with_reference: bool) -> list[str]:
    """What a node's slots keep in their host's memory while engines serve (the reference policy always), if it is too much."""
    kept = (slot.weights + slot.optimizer + slot.critic) * offloads + slot.weights * with_reference
    needed = kept * hardware.gpus_per_node
    if needed <= hardware.host_memory_bytes:
        return []
    return [
        f"a node's trainers keep {_gb(needed)} in host memory while engines serve, it has {_gb(hardware.host_memory_bytes)}; "
        "more nodes (pp, ep, dp) hold less each, or training.offload=never where the devices have room"
    ]


def memory_warnings(all_moments: list[Moment], hardware: Hardware) -> list[str]:
    return [
        f"'{moment.name}' leaves {_gb(moment.free)} free: fragmentation or uneven experts may not fit"
        for moment in all_moments
        if 0 <= moment.free < FULL_SHARE * hardware.memory_bytes and moment.name != "generate"
    ]


def memory_suggestions(
    worst: Moment,
    training: TrainingSection,
    layout: Layout,
    rollout: RolloutSection,
    facts: Facts,
    hardware: Hardware,
) -> list[str]:
    """For a moment that does not fit: the cheapest change to its largest part first."""
    largest = sorted(worst.parts, key=lambda part: -worst.parts[part])
    found = []
    for part in largest:
        if part in ("activations", "working") and training.recompute != "full":
            found.append(
                "training.recompute=full keeps one hidden state per layer instead of its activations"
            )
        elif part == "activations" and layout.tp < hardware.gpus_per_node:
            found.append(f"a larger training.layout.tp (now {layout.tp}) splits activations by sequence")
        elif (
            part in ("optimizer", "gradients", "trainer weights", "critic") and facts.num_experts > layout.ep
        ):
            found.append(
                f"a larger training.layout.ep (now {layout.ep}) or pp (now {layout.pp}) holds fewer experts per rank"
            )
        elif part == "rollout weights":
            found.append(f"a larger rollout.tp (now {rollout.tp}) holds less of the model per engine rank")
        elif part == "optimizer":
            found.append("more data-parallel replicas split the optimizer state further")
        elif part == "KV cache":
            found.append(
                f"a lower rollout.gpu_memory_utilization (now {rollout.gpu_memory_utilization:g}) leaves room beside the KV cache"
            )
    return list(dict.fromkeys(found))[:3]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
