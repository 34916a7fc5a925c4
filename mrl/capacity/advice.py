"""Errors, warnings and suggestions: what does not divide, does not fit, or could be better.

Each line says what to change.
"""

from __future__ import annotations

import dataclasses

from mrl.capacity.estimate import Estimate
from mrl.capacity.memory_timeline import Event
from mrl.capacity.phase_deadlines import NEAR, Wait
from mrl.config.run_warnings import warnings_of
from mrl.models.tensors import BLOCK
from mrl.resharding.planner.quantised import cut_inside_blocks
from mrl.resharding.planner.trainer_manifests import trainer_rank_manifests
from mrl.rollout.engine_process import slots_per_node

FULL_SHARE = 0.08
"""Free share of the device below which an event is called tight."""
SMALL_OFF_RAIL = 0.05
"""Share of inter-node bytes that may leave their rail without a warning (attention mostly does)."""
SMALL_SLICE = 256
"""Inner width of an expert's slice below which its matrix products are called too small."""


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """Lines about an estimate; with any errors, the configuration does not fit."""

    errors: list[str]
    warnings: list[str]
    suggestions: list[str]


def advise(estimate: Estimate) -> Advice:
    """Return all lines about an estimate."""
    return Advice(
        errors=[
            *memory_errors(estimate),
            *host_errors(estimate),
            *cache_errors(estimate),
            *deadline_errors(estimate),
        ],
        warnings=[
            *layout_warnings(estimate),
            *engine_warnings(estimate),
            *expert_warnings(estimate),
            *traffic_warnings(estimate),
            *memory_warnings(estimate),
            *quantisation_warnings(estimate),
            *cache_warnings(estimate),
            *deadline_warnings(estimate),
        ],
        suggestions=memory_suggestions(estimate),
    )


def memory_errors(estimate: Estimate) -> list[str]:
    """Return an error for each event that does not fit the device."""
    size = _gb(estimate.hardware.memory_bytes)
    return [
        f"'{event.name}' needs {_gb(event.total)} of {size}: {_gb(-event.free)} too much ({_parts(event)})"
        for event in estimate.timeline
        if event.free < 0
    ]


def _parts(event: Event) -> str:
    return ", ".join(f"{part} {_gb(size)}" for part, size in event.parts.items())


def host_errors(estimate: Estimate) -> list[str]:
    """Return an error for each moment at which a node's slots need more than its host memory."""
    size = _gb(estimate.hardware.host_memory_bytes)
    return [
        f"'{moment.name}' needs {_gb(moment.total)} of a node's {size} of host memory ({_parts(moment)}); "
        "use more nodes (pp, ep, dp), which need less each, or training.offload=never if the devices have "
        "room"
        for moment in estimate.host
        if moment.free < 0
    ]


def deadline_errors(estimate: Estimate) -> list[str]:
    """Return an error for each wait that exceeds its deadline."""
    return [_wait(wait) for wait in estimate.waits if wait.share > 1]


def deadline_warnings(estimate: Estimate) -> list[str]:
    """Return a warning for each wait that comes close to its deadline."""
    return [_wait(wait) for wait in estimate.waits if NEAR < wait.share <= 1]


def _wait(wait: Wait) -> str:
    return (
        f"{wait.name} takes {wait.seconds:,.0f} s (an estimate from mean lengths) of {wait.setting} = "
        f"{wait.deadline:,.0f} s; raise it, or shorten the wait"
    )


def cache_errors(estimate: Estimate) -> list[str]:
    """Return an error if the engine's share of the device leaves no KV cache."""
    if estimate.engine.kv_cache > 0:
        return []
    return [
        f"rollout.gpu_memory_utilization = {estimate.config.rollout.gpu_memory_utilization:g} of the device "
        "is less than the engine's weights: no KV cache is left; raise it or rollout.tp"
    ]


def layout_warnings(estimate: Estimate) -> list[str]:
    """Return warnings about a trainer layout that works but is probably not intended."""
    facts, layout, node = estimate.facts, estimate.layout, estimate.hardware.gpus_per_node
    lines = []
    if facts.num_layers % (layout.pp * layout.vpp):
        lines.append(
            f"{facts.num_layers} layers do not divide into pp x vpp = {layout.pp} x {layout.vpp}: the first "
            "stages have one more layer, and the others wait for them"
        )
    if facts.vocab % layout.tp:
        lines.append(
            f"the vocabulary ({facts.vocab}) does not divide into training.layout.tp = {layout.tp}: it is "
            "padded"
        )
    for name, size in (("training.layout.tp", layout.tp), ("training.layout.tp x cp", layout.tp * layout.cp)):
        if size > node:
            lines.append(
                f"{name} = {size} spans nodes of {node}: its collectives cross the network in every layer"
            )
            break
    if (slots := estimate.config.num_slots) > node and slots % node:
        lines.append(f"{slots} slots do not fill nodes of {node}")
    if not facts.latent_attention and layout.tp > facts.kv_heads:
        lines.append(
            f"training.layout.tp = {layout.tp} exceeds the {facts.kv_heads} key and value heads: query "
            "groups are cut, and every group's weights are sent in pieces"
        )
    return lines


def engine_warnings(estimate: Estimate) -> list[str]:
    """Return a warning if an engine's tp ranks span nodes, with what then crosses the network."""
    facts, tp = estimate.facts, estimate.config.rollout.tp
    most = max(map(len, slots_per_node(estimate.config, estimate.nodes)))
    if most == 1:
        return []
    remedy = "; rollout.dp over the nodes keeps them inside one" * bool(facts.num_experts)
    return [
        f"rollout.tp = {tp}: the tp ranks of an engine are on {most} nodes, and the two all-reduces of each "
        f"layer ({facts.num_layers} x 2 of {facts.hidden} numbers per token) cross the network{remedy}"
    ]


def expert_warnings(estimate: Estimate) -> list[str]:
    """Return warnings about slow experts or disturbed routing."""
    facts, rollout = estimate.facts, estimate.config.rollout
    aux_loss = estimate.config.training.router_aux_loss
    if not facts.num_experts:
        return []
    lines, inner = [], facts.expert_inner
    is_cut = rollout.tp > 1 and not rollout.expert_parallel and facts.num_experts % rollout.tp == 0
    if is_cut and inner // rollout.tp < SMALL_SLICE:
        lines.append(
            f"the engines cut each expert's inner width of {inner} into {rollout.tp} slices of "
            f"{inner // rollout.tp}: matrix products are small, and every slice comes from every rank; "
            "rollout.expert_parallel=true distributes whole experts"
        )
    if aux_loss:
        lines.append(
            f"training.router_aux_loss = {aux_loss:g}: in RL the balance loss works against the reward; "
            "usually set 0 and watch moe/load_max_over_mean_max and moe/load_entropy_min"
        )
    return lines


def traffic_warnings(estimate: Estimate) -> list[str]:
    """Return a warning if too many bytes leave their rail."""
    share = estimate.traffic.off_rail / max(1, sum(estimate.traffic.network_in))
    if estimate.config.launch.engine_slots:  # between pools, equal loads matter more than rails
        return []
    if share < SMALL_OFF_RAIL:
        return []
    return [
        f"rail misalignment: {share:.0%} of the bytes between nodes come from another rail than the "
        "receiver's; set training.layout.ep (tp) to rollout.dp x tp (rollout.tp) to keep experts (the rest) "
        "on their rail"
    ]


def memory_warnings(estimate: Estimate) -> list[str]:
    """Return a warning for each event that leaves little of the device free."""
    tight = FULL_SHARE * estimate.hardware.memory_bytes
    return [
        f"'{event.name}' leaves {_gb(event.free)} free: fragmentation or uneven experts may not fit"
        for event in estimate.timeline
        if 0 <= event.free < tight and not event.name.endswith("generate")
    ]


def quantisation_warnings(estimate: Estimate) -> list[str]:
    """Return the configuration's own warnings, and one for tensors that the trainer cuts inside blocks.

    Only the first layer of each kind is checked, because all layers of a kind and all stages are cut alike.
    """
    config, facts = estimate.config, estimate.facts
    if config.rollout.quantization == "none":
        return warnings_of(config)
    kinds = [facts.family.is_moe_layer(facts.hf, number) for number in range(facts.num_layers)]
    few_layers = facts.hf | {"num_hidden_layers": 1 + max(map(kinds.index, set(kinds)))}
    one_stage = dataclasses.replace(estimate.layout, pp=1, vpp=1)
    cut = cut_inside_blocks(trainer_rank_manifests(few_layers, one_stage), BLOCK)
    if not cut:
        return warnings_of(config)
    return [
        *warnings_of(config),
        f"rollout.quantization = {config.rollout.quantization}: the trainer's layout cuts tensors inside "
        f"blocks of {BLOCK} ({min(cut)}, ...): every weight sync sends these whole modules to every engine "
        "rank; a smaller training.layout.tp or etp avoids this",
    ]


def cache_warnings(estimate: Estimate) -> list[str]:
    """Return a warning if an engine can decode only part of its samples at once."""
    made, limit = estimate.generation, estimate.config.rollout.max_num_seqs
    setting = "gpu_memory_utilization" if estimate.on_gpus else "kv_cache_bytes"
    if made.concurrent >= min(made.samples, limit):
        return []
    return [
        f"the KV cache fits {made.concurrent} sequences of mean length, but an engine has {made.samples} and "
        f"may run {limit}: more device memory, a larger rollout.tp or {setting}, or shorter responses speed "
        "up generation"
    ]


def memory_suggestions(estimate: Estimate) -> list[str]:
    """Return the cheapest changes for the fullest event if it does not fit, largest part first."""
    worst = min(estimate.timeline, key=lambda event: event.free)
    if worst.free >= 0:
        return []
    largest = sorted(worst.parts, key=lambda part: -worst.parts[part])
    lines = (_smaller(part, estimate) for part in largest)
    return list(dict.fromkeys(line for line in lines if line))[:3]


def _smaller(part: str, estimate: Estimate) -> str | None:
    """Return the change that makes one part of the memory smaller; None if there is none."""
    config, layout = estimate.config, estimate.layout
    rollout = config.rollout
    if part in ("activations", "working") and config.training.microbatch_tokens > config.model.max_length:
        return (
            f"a smaller training.microbatch_tokens (now {config.training.microbatch_tokens}; the longest "
            f"sample has {config.model.max_length}) needs fewer activations"
        )
    if part in ("activations", "working") and config.training.recompute != "full":
        return "training.recompute=full keeps one hidden state per layer instead of its activations"
    if part == "activations" and layout.tp < estimate.hardware.gpus_per_node:
        return f"a larger training.layout.tp (now {layout.tp}) splits activations by sequence"
    section = config.training.optimizer
    can_offload = estimate.on_gpus and section.moments_dtype == "float32" and section.offload_fraction < 1
    if part == "optimizer" and can_offload:
        return (
            f"training.optimizer.offload_fraction=1 (now {section.offload_fraction:g}) keeps the optimizer "
            "state in host memory"
        )
    trained = part in ("optimizer", "gradients", "trainer weights", "critic")
    if trained and estimate.facts.num_experts > layout.ep:
        return (
            f"a larger training.layout.ep (now {layout.ep}) or pp (now {layout.pp}) puts fewer experts on a "
            "rank"
        )
    if part == "rollout weights":
        axis = "dp" if rollout.dp > 1 else "tp"
        return (
            f"a larger rollout.{axis} (now {getattr(rollout, axis)}) puts less of the model on an engine rank"
        )
    if part == "optimizer":
        return "more data-parallel replicas split the optimizer state further"
    if part == "engine process" and estimate.on_gpus:
        return (
            "rollout.engine_args={sleep_mode_offload_cudagraph: true, enable_nccl_comm_suspend: true} frees "
            "the graphs and, with NCCL 2.29.7 and newer, the communicators of a sleeping engine"
        )
    if part == "KV cache" and not estimate.on_gpus:
        return f"a lower rollout.kv_cache_bytes (now {rollout.kv_cache_bytes}) makes the KV cache smaller"
    if part == "KV cache":
        share = f"rollout.gpu_memory_utilization (now {rollout.gpu_memory_utilization:g})"
        return f"a lower {share} makes the KV cache smaller"
    return None


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
