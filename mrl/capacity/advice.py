"""Errors, warnings and suggestions: what does not divide, does not fit, or would be better otherwise.

Each line names what to change.
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
from mrl.rollout.part import on_each_node

FULL_SHARE = 0.08
"""Free share of the device below which an event is called tight."""
SMALL_OFF_RAIL = 0.05
"""Share of the bytes between nodes that may leave their rail unmentioned (attention mostly does)."""
SMALL_SLICE = 256
"""Inner width of an expert's slice below which its matrix products are called too small."""


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """What people are told of an estimate; with any errors the configuration does not fit."""

    errors: list[str]
    warnings: list[str]
    suggestions: list[str]


def advise(estimate: Estimate) -> Advice:
    """All lines that there are to say of an estimate."""
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
    """Names the events that do not fit the device."""
    size = _gb(estimate.hardware.memory_bytes)
    return [
        f"'{event.name}' needs {_gb(event.total)} of {size}: {_gb(-event.free)} too much ({_parts(event)})"
        for event in estimate.timeline
        if event.free < 0
    ]


def _parts(event: Event) -> str:
    return ", ".join(f"{part} {_gb(size)}" for part, size in event.parts.items())


def host_errors(estimate: Estimate) -> list[str]:
    """Names the moments at which a node's slots need more than their host's memory."""
    size = _gb(estimate.hardware.host_memory_bytes)
    return [
        f"'{moment.name}' needs {_gb(moment.total)} of a node's {size} of host memory ({_parts(moment)}); more nodes (pp, "
        "ep, dp) hold less each, or training.offload=never where the devices have room"
        for moment in estimate.host
        if moment.free < 0
    ]


def deadline_errors(estimate: Estimate) -> list[str]:
    """Names the waits that end the run by their deadline."""
    return [_wait(wait) for wait in estimate.waits if wait.share > 1]


def deadline_warnings(estimate: Estimate) -> list[str]:
    """Names the waits that come near their deadline."""
    return [_wait(wait) for wait in estimate.waits if NEAR < wait.share <= 1]


def _wait(wait: Wait) -> str:
    return (
        f"{wait.name} takes {wait.seconds:,.0f} s of the {wait.deadline:,.0f} s of {wait.setting}, an estimate of means; "
        "raise it, or make the wait shorter"
    )


def cache_errors(estimate: Estimate) -> list[str]:
    """Says that the engine's share of the device leaves no KV cache."""
    if estimate.engine.kv_cache > 0:
        return []
    return [
        f"rollout.gpu_memory_utilization = {estimate.config.rollout.gpu_memory_utilization:g} of the device is less "
        "than the engine's weights: no KV cache is left; raise it or rollout.tp"
    ]


def layout_warnings(estimate: Estimate) -> list[str]:
    """Names what works in the trainer's layout and is probably not what one wants."""
    facts, layout, node = estimate.facts, estimate.layout, estimate.hardware.gpus_per_node
    lines = []
    if facts.num_layers % (layout.pp * layout.vpp):
        lines.append(
            f"{facts.num_layers} layers do not divide into pp x vpp = {layout.pp} x {layout.vpp}: the first stages hold "
            "one layer more, the others wait for them"
        )
    if facts.vocab % layout.tp:
        lines.append(
            f"the vocabulary ({facts.vocab}) does not divide into training.layout.tp = {layout.tp}: it is padded"
        )
    for name, size in (("training.layout.tp", layout.tp), ("training.layout.tp x cp", layout.tp * layout.cp)):
        if size > node:
            lines.append(
                f"{name} = {size} spans nodes of {node}: its collectives run on the network in every layer"
            )
            break
    if (slots := estimate.config.num_slots) > node and slots % node:
        lines.append(f"{slots} slots do not fill nodes of {node}")
    if not facts.latent_attention and layout.tp > facts.kv_heads:
        lines.append(
            f"training.layout.tp = {layout.tp} is above the {facts.kv_heads} key and value heads: query groups are cut, and "
            "every group's weights arrive in pieces"
        )
    return lines


def engine_warnings(estimate: Estimate) -> list[str]:
    """Says that an engine's tp ranks lie on several nodes, and what goes over the network then."""
    facts, tp = estimate.facts, estimate.config.rollout.tp
    most = max(map(len, on_each_node(estimate.config, estimate.nodes)))
    if most == 1:
        return []
    remedy = "; rollout.dp over the nodes keeps them inside one" * bool(facts.num_experts)
    return [
        f"rollout.tp = {tp}: the tp ranks of an engine lie on {most} nodes, and the two sums of each layer ({facts.num_layers} x 2 of "
        f"{facts.hidden} numbers a token) cross the network, which the times here do not count{remedy}"
    ]


def expert_warnings(estimate: Estimate) -> list[str]:
    """Names what slows experts down or pulls at their routing."""
    facts, rollout = estimate.facts, estimate.config.rollout
    aux_loss = estimate.config.training.router_aux_loss
    if not facts.num_experts:
        return []
    lines, inner = [], facts.expert_inner
    is_cut = rollout.tp > 1 and not rollout.expert_parallel and facts.num_experts % rollout.tp == 0
    if is_cut and inner // rollout.tp < SMALL_SLICE:
        lines.append(
            f"the engines cut each expert's inner width of {inner} into {rollout.tp} slices of {inner // rollout.tp}: "
            "small matrix products, and every slice comes from every rank; rollout.expert_parallel=true deals out whole "
            "experts"
        )
    if aux_loss:
        lines.append(
            f"training.router_aux_loss = {aux_loss:g}: under RL the balance loss pulls against the reward; "
            "usual is 0 with a watch on moe/load_max_over_mean_max and moe/load_entropy_min"
        )
    return lines


def traffic_warnings(estimate: Estimate) -> list[str]:
    """Says that too many bytes leave their rail."""
    share = estimate.traffic.off_rail / max(1, sum(estimate.traffic.network_in))
    if share < SMALL_OFF_RAIL:
        return []
    return [
        f"rail misalignment: {share:.0%} of the bytes between nodes have no holder on the receiver's rail and cross to "
        "another; training.layout.ep (tp) equal to rollout.dp x tp (rollout.tp) keeps experts (the rest) on it"
    ]


def memory_warnings(estimate: Estimate) -> list[str]:
    """Names the events that leave little of the device free."""
    tight = FULL_SHARE * estimate.hardware.memory_bytes
    return [
        f"'{event.name}' leaves {_gb(event.free)} free: fragmentation or uneven experts may not fit"
        for event in estimate.timeline
        if 0 <= event.free < tight and not event.name.endswith("generate")
    ]


def quantisation_warnings(estimate: Estimate) -> list[str]:
    """Repeats what the configuration says of itself, and names a tensor that the trainer cuts inside blocks: those of the first
    layer of each kind are asked, because all layers of a kind and all stages are cut alike."""
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
        f"rollout.quantization = {config.rollout.quantization}: the trainer's layout cuts tensors inside blocks "
        f"of {BLOCK} ({min(cut)}, ...): they and the rest of their modules go whole to every engine rank at every weight "
        "sync; a smaller training.layout.tp or etp avoids it",
    ]


def cache_warnings(estimate: Estimate) -> list[str]:
    """Says that an engine can decode only a part of its samples at once."""
    made, limit = estimate.generation, estimate.config.rollout.max_num_seqs
    if made.concurrent >= min(made.samples, limit):
        return []
    return [
        f"the KV cache holds {made.concurrent} sequences of mean length, an engine has {made.samples} and may run {limit}: "
        "more device memory, a larger rollout.tp or gpu_memory_utilization, or shorter responses make generation faster"
    ]


def memory_suggestions(estimate: Estimate) -> list[str]:
    """Proposes, for the first event that does not fit, the cheapest change to its largest part first."""
    worst = next((event for event in estimate.timeline if event.free < 0), None)
    if worst is None:
        return []
    largest = sorted(worst.parts, key=lambda part: -worst.parts[part])
    lines = (_smaller(part, estimate) for part in largest)
    return list(dict.fromkeys(line for line in lines if line))[:3]


def _smaller(part: str, estimate: Estimate) -> str | None:
    """The change that makes one part of the memory smaller; None where there is none."""
    config, layout = estimate.config, estimate.layout
    rollout = config.rollout
    if part in ("activations", "working") and config.training.recompute != "full":
        return "training.recompute=full keeps one hidden state per layer instead of its activations"
    if part == "activations" and layout.tp < estimate.hardware.gpus_per_node:
        return f"a larger training.layout.tp (now {layout.tp}) splits activations by sequence"
    section = config.training.optimizer
    if part == "optimizer" and section.moments_dtype == "float32" and section.offload_fraction < 1:
        return (
            f"training.optimizer.offload_fraction=1 (now {section.offload_fraction:g}) rests the optimizer's state in the host's "
            "memory"
        )
    trained = part in ("optimizer", "gradients", "trainer weights", "critic")
    if trained and estimate.facts.num_experts > layout.ep:
        return f"a larger training.layout.ep (now {layout.ep}) or pp (now {layout.pp}) holds fewer experts per rank"
    if part == "rollout weights":
        axis = "dp" if rollout.dp > 1 else "tp"
        return (
            f"a larger rollout.{axis} (now {getattr(rollout, axis)}) holds less of the model per engine rank"
        )
    if part == "optimizer":
        return "more data-parallel replicas split the optimizer state further"
    if part == "engine process":
        return (
            "rollout.engine_args={sleep_mode_offload_cudagraph: true, enable_nccl_comm_suspend: true} gives back the graphs "
            "and, with NCCL 2.29.7 and newer, the communicators of a sleeping engine"
        )
    if part == "KV cache":
        share = f"rollout.gpu_memory_utilization (now {rollout.gpu_memory_utilization:g})"
        return f"a lower {share} leaves room beside the KV cache"
    return None


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
