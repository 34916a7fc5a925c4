"""Check what a run requires of its model, layout and nodes: one set of rules for `mrl train` and `mrl plan`.

Nothing is started, no weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.lora import LoraSection
from mrl.cpu import vllm_limits
from mrl.errors import ConfigError
from mrl.models.adapters import adapters
from mrl.models.engine_rows import Shard
from mrl.models.facts import ModelSize
from mrl.models.families import family_of, require_trainable
from mrl.models.family import require_draft_head
from mrl.models.layout import Layout
from mrl.models.rope import kind, max_positions
from mrl.rollout import engine_routes, passthrough_args, quantised
from mrl.rollout.engine_process import EngineProcess, slots_per_node


def unmet(
    config: Config, hf: dict[str, Any], nodes: Sequence[int], *, gpus: bool, engines: bool = True
) -> list[str]:
    """Return why a run of a model (its config.json as `hf`) cannot start on these slots; empty if it can.

    Args:
        nodes: Node number of each slot, in rank order.
        gpus: The slots are GPUs.
        engines: The run has engines; `mrl tune` has none.
    """
    if untrainable := _errors_of(lambda: require_trainable(hf)):
        return untrainable
    rules: list[Callable[[], list[str]]] = [
        lambda: lengths(config, hf),
        lambda: layers(config, hf),
        lambda: divisions(config, hf) or _names(config, hf),
    ]
    of_engines: list[Callable[[], list[str]]] = [
        lambda: prompts_and_responses(config),
        lambda: check_replay(config, hf, gpus=gpus),
        lambda: nccl_sharing(config) if gpus else [],
        lambda: engines_over_nodes(config, nodes),
        lambda: passthrough_args.argument_faults(config.rollout.engine_args),
        lambda: _errors_of(lambda: quantised.require_whole_blocks(hf, config.rollout)),
        lambda: [] if gpus else cpu_engines(config, hf),
    ]
    return [line for rule in (*rules, *(of_engines if engines else ())) for line in rule()]


def node_numbers(num_slots: int, slots_per_node: int) -> list[int]:
    """Return the node number of each slot if nodes are filled one after the other."""
    return [slot // slots_per_node for slot in range(num_slots)]


def lengths(config: Config, hf: dict[str, Any]) -> list[str]:
    """Return an error if sequences are longer than the model allows."""
    longest = config.model.max_length
    if longest <= (positions := max_positions(hf) or longest):
        return []
    limit = "factor x original_max_position_embeddings" if kind(hf) == "yarn" else "max_position_embeddings"
    return [f"model.max_length = {longest} exceeds the model's {positions} positions ({limit}); lower it"]


def prompts_and_responses(config: Config) -> list[str]:
    """Return an error if the longest prompt and response together exceed model.max_length."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if prompt + response <= config.model.max_length:
        return []
    return [
        f"data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} exceeds "
        f"model.max_length = {config.model.max_length}; raise it, or lower one of them"
    ]


def layers(config: Config, hf: dict[str, Any]) -> list[str]:
    """Return an error if Transformer Engine's layers do not support the model's attention."""
    if config.training.spec != "transformer_engine" or not family_of(hf).needs_own_attention:
        return []
    return [
        "training.spec = transformer_engine: only our own layers implement the attention of "
        f"{hf['model_type']} (attention sinks); set local or auto"
    ]


def check_replay(config: Config, hf: dict[str, Any], *, gpus: bool) -> list[str]:
    """Return an error if there are no routes to replay, or engines cannot record them."""
    replay, deterministic = config.routing.replay, config.loop.deterministic
    if replay != "off" and not ModelSize(hf, "").num_experts:
        return [f"routing.replay = {replay}: the model has no experts to choose from; set it to off"]
    if replay != "engine" or not gpus:
        return []
    return _errors_of(lambda: engine_routes.require_prefix_cache(config.rollout, deterministic=deterministic))


def nccl_sharing(config: Config) -> list[str]:
    """Return an error if NCCL would have to connect two processes on one GPU, which it refuses ("Duplicate
    GPU detected", ncclInvalidUsage in NCCL's src/init.cc)."""
    if config.launch.engine_slots or config.sync.transport != "distributed":
        return []
    return [
        "sync.transport = distributed with engines on the trainer's GPUs: NCCL allows one process per GPU in "
        "a group; set auto, which uses the GPU's own memory, or launch.engine_slots"
    ]


def reward_engines(config: Config, *, gpus: int, joins: bool) -> list[str]:
    """Return why the servers of reward.engines cannot have their GPUs on the driver's machine, which has
    `gpus`; `joins`: the run uses an existing Ray cluster."""
    engines = config.reward.engines
    used = [gpu for engine in engines.values() for gpu in engine.gpus]
    if bare := [name for name, engine in engines.items() if gpus and not engine.gpus]:
        return [f"reward.engines.{bare[0]}.gpus is empty; on a machine with GPUs, name the server's own"]
    if unknown := sorted({gpu for gpu in used if not 0 <= gpu < gpus}):
        return [f"reward.engines names the GPUs {unknown}, but this machine has {gpus}"]
    if len(set(used)) < len(used):
        return [f"reward.engines names a GPU more than once: {sorted(used)}"]
    if used and joins:
        return [
            "reward.engines with gpus on an existing Ray cluster: its GPUs belong to Ray; start a server and "
            "set its path"
        ]
    reserved = sum(len(engine.gpus) for engine in engines.values() if not engine.shares_slots)
    if reserved and config.num_slots > gpus - reserved:
        return [
            f"the layout needs {config.num_slots} GPUs, but reward.engines leaves {gpus - reserved}; lower "
            "one of them"
        ]
    return []


def divisions(config: Config, hf: dict[str, Any]) -> list[str]:
    """Return an error for each part of the model that training.layout or rollout.tp cannot split."""
    facts, layout, rollout = ModelSize(hf, ""), config.training.layout, config.rollout
    splits = [
        (facts.num_heads, layout.tp, "attention heads", "training.layout.tp"),
        (facts.num_heads, rollout.tp, "attention heads", "rollout.tp"),
    ]
    if facts.num_experts:
        inner = facts.expert_inner
        splits += [
            (facts.num_experts, layout.ep, "experts", "training.layout.ep"),
            (inner, layout.etp, "an expert's inner width", "training.layout.etp"),
        ]
        if rollout.expert_parallel:
            name = "rollout.tp (expert_parallel)" if rollout.dp == 1 else "rollout.dp x tp"
            splits.append((facts.num_experts, rollout.ep, "experts", name))
        else:
            splits.append((inner, rollout.tp, "an expert's inner width", "rollout.tp"))
    dense = rollout.dp > 1 and not facts.num_experts
    lines = [
        f"rollout.dp = {rollout.dp}: the model has no experts to distribute over an engine's ranks; leave it "
        "1 and run more engines"
    ] * dense
    lines += [
        f"{part} ({count}) are not divisible by {name} = {parts}"
        for count, parts, part, name in splits
        if count % parts
    ]
    if not facts.latent_attention:
        lines += [
            f"key and value heads ({facts.kv_heads}) and {name} = {tp}: neither divides the other"
            for name, tp in (("training.layout.tp", layout.tp), ("rollout.tp", rollout.tp))
            if facts.kv_heads % tp and tp % facts.kv_heads
        ]
    if facts.num_layers < layout.pp * layout.vpp:
        lines.append(f"{facts.num_layers} layers cannot fill pp x vpp = {layout.pp} x {layout.vpp} stages")
    return lines


def engines_over_nodes(config: Config, nodes: Sequence[int]) -> list[str]:
    """Return an error for the first engine that nodes share unequally: each dp rank needs equal shares of tp
    ranks, and all dp ranks of an engine the same number of nodes."""
    rollout, slots = config.rollout, config.engine_slots
    after = f" and the {slots[0]} slots of the trainer before them" * bool(slots[0])
    remedy = f"choose a rollout.tp that divides the slots of a node{after}, or a multiple of them"
    shares = slots_per_node(config, nodes)
    for number, share in enumerate(shares):
        part = EngineProcess.of(number, dp=rollout.dp)
        if len(set(share)) > 1:
            own_nodes = sorted({nodes[slot] for slot in slots[number * rollout.tp :][: rollout.tp]})
            return [
                f"rollout.tp = {rollout.tp}: {part.name} would have {' + '.join(map(str, share))} of its tp "
                f"ranks on nodes {own_nodes}, which must share them equally; {remedy}"
            ]
        if len(share) != len(others := shares[number - part.dp_rank]):
            return [
                f"rollout.tp = {rollout.tp}: {part.name} would be on {len(share)} nodes and dp rank 0 on "
                f"{len(others)}, which must be equal; {remedy}"
            ]
    return []


def cpu_engines(config: Config, hf: dict[str, Any]) -> list[str]:
    """Return why vLLM's CPU kernels cannot serve the model in this layout."""
    tp, expert_parallel, name = config.rollout.tp, config.rollout.expert_parallel, config.model.path
    return _errors_of(
        lambda: vllm_limits.check_cpu_shapes(hf, tp=tp, expert_parallel=expert_parallel, name=name)
    )


def _names(config: Config, hf: dict[str, Any]) -> list[str]:
    """Return the errors of the family's name tables for the layouts of trainer and engines."""
    trains_drafts = config.training.drafts == "trained"
    return [
        *layout_errors(hf, config.training.layout.sizes(), lora=config.training.lora),
        *(_errors_of(lambda: require_draft_head(family_of(hf), hf)) if trains_drafts else ()),
        *_errors_of(lambda: _an_engine_rank(config, hf)),
    ]


def layout_errors(hf: dict[str, Any], layout: Layout, *, lora: LoraSection | None) -> list[str]:
    """Return the errors of the family's name table, which decides on a trainer's layout, for the first rank
    of each stage: the others have equal shares of the same tensors."""
    family = family_of(hf)
    stages = [place for place in layout.all_coordinates() if place.tp == place.cp == place.dp == 0]

    def ask() -> None:
        for place in stages:
            family.local_tensors(hf, layout, place)
            if lora is not None:
                adapters(family, hf, layout, place, lora)

    return _errors_of(ask)


def _an_engine_rank(config: Config, hf: dict[str, Any]) -> None:
    """Ask the family, which decides on split experts, for the parameters of an engine's first rank."""
    rollout = config.rollout
    family_of(hf).engine_tensors(hf, Shard(rollout.tp, 0, rollout.tp if rollout.expert_parallel else 1))


def _errors_of(check: Callable[[], object]) -> list[str]:
    """Return the message of a check that raises ConfigError; empty if it passes."""
    try:
        check()
    except ConfigError as error:
        return [str(error)]
    return []
