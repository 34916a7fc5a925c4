"""What a run requires of its model, layout and nodes: one set of rules for `mrl train` and `mrl plan`.

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
from mrl.models.facts import Facts
from mrl.models.families import family_of, require_trainable
from mrl.models.layout import Layout
from mrl.models.rope import kind, max_positions
from mrl.rollout import engine_routes, passthrough_args, quantised
from mrl.rollout.part import Part, on_each_node


def unmet(
    config: Config, hf: dict[str, Any], nodes: Sequence[int], *, gpus: bool, engines: bool = True
) -> list[str]:
    """Says why a run of a model (its config.json as `hf`) cannot start on these slots; empty where it can.

    `nodes`: the number of each slot's node, in rank order. `gpus`: whether the slots are GPUs. `engines`: whether the run has any;
    `mrl tune` has none.
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
        lambda: messages(config) if gpus else [],
        lambda: engines_over_nodes(config, nodes),
        lambda: passthrough_args.argument_faults(config.rollout.engine_args),
        lambda: _errors_of(lambda: quantised.require_whole_blocks(hf, config.rollout)),
        lambda: [] if gpus else cpu_engines(config, hf),
    ]
    return [line for rule in (*rules, *(of_engines if engines else ())) for line in rule()]


def node_numbers(num_slots: int, slots_per_node: int) -> list[int]:
    """The number of each slot's node where nodes are filled one after the other."""
    return [slot // slots_per_node for slot in range(num_slots)]


def lengths(config: Config, hf: dict[str, Any]) -> list[str]:
    """Names sequences that are longer than the model allows."""
    longest = config.model.max_length
    if longest <= (known := max_positions(hf) or longest):
        return []
    said = "factor x original_max_position_embeddings" if kind(hf) == "yarn" else "max_position_embeddings"
    return [f"model.max_length = {longest} exceeds the model's {known} positions ({said})"]


def prompts_and_responses(config: Config) -> list[str]:
    """Names a longest prompt and response that are together longer than model.max_length."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if prompt + response <= config.model.max_length:
        return []
    return [
        f"data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} exceeds "
        f"model.max_length = {config.model.max_length}"
    ]


def layers(config: Config, hf: dict[str, Any]) -> list[str]:
    """Says that Transformer Engine's layers do not compute the model's attention."""
    if config.training.spec != "transformer_engine" or not family_of(hf).own_attention:
        return []
    return [
        f"training.spec = transformer_engine: the attention of {hf['model_type']} is implemented in our own layers alone "
        "(attention sinks); set local or auto"
    ]


def check_replay(config: Config, hf: dict[str, Any], *, gpus: bool) -> list[str]:
    """Says so where there are no routes to replay, or where engines cannot tell them."""
    wanted, deterministic = config.routing.replay, config.loop.deterministic
    if wanted != "off" and not Facts(hf, "").num_experts:
        return [f"routing.replay = {wanted}: the model has no experts to choose from; set it to off"]
    if wanted != "engine" or not gpus:
        return []
    return _errors_of(lambda: engine_routes.require_prefix_cache(config.rollout, deterministic=deterministic))


def messages(config: Config) -> list[str]:
    """Says that NCCL cannot carry weights between two processes of one GPU: a communicator refuses a second rank on a device
    ("Duplicate GPU detected", ncclInvalidUsage in NCCL's src/init.cc)."""
    if config.launch.engine_slots or config.sync.transport != "distributed":
        return []
    return [
        "sync.transport = distributed with engines on the trainer's GPUs: NCCL takes one process of a GPU into a group; set auto, which "
        "goes through the GPU's own memory, or launch.engine_slots"
    ]


def reward_engines(config: Config, *, gpus: int, joins: bool) -> list[str]:
    """Says why the servers of reward.engines cannot have the GPUs that they name on the driver's machine, which has so many.
    `joins`: the run's slots are of a Ray cluster that is there already."""
    engines = config.reward.engines
    used = [gpu for engine in engines.values() for gpu in engine.gpus]
    if bare := [name for name, engine in engines.items() if gpus and not engine.gpus]:
        return [f"reward.engines.{bare[0]}.gpus names none; on a machine with GPUs a server has its own"]
    if unknown := sorted({gpu for gpu in used if not 0 <= gpu < gpus}):
        return [f"reward.engines names the GPUs {unknown}; this machine has {gpus}"]
    if len(set(used)) < len(used):
        return [f"reward.engines names a GPU twice: {sorted(used)}"]
    if used and joins:
        return [
            "reward.engines with gpus on a Ray cluster that is there already: its GPUs are Ray's; start the server yourself and "
            "give its path"
        ]
    own = sum(len(engine.gpus) for engine in engines.values() if not engine.shares_slots)
    if own and config.num_slots > gpus - own:
        return [
            f"the layout needs {config.num_slots} GPUs; beside those of reward.engines there are {gpus - own}"
        ]
    return []


def divisions(config: Config, hf: dict[str, Any]) -> list[str]:
    """Names parts of the model that training.layout or rollout.tp cannot split."""
    facts, layout, rollout = Facts(hf, ""), config.training.layout, config.rollout
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
        f"rollout.dp = {rollout.dp}: the model has no experts to deal out over the ranks of an engine; leave it 1, and more "
        "engines run"
    ] * dense
    lines += [
        f"{what} ({count}) do not divide into {name} = {parts}"
        for count, parts, what, name in splits
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
    """Names the first engine whose slots nodes share unequally: those of a dp rank must have equally many of its tp ranks, and the
    dp ranks of an engine must lie on equally many nodes."""
    rollout, slots = config.rollout, config.engine_slots
    after = f" and the {slots[0]} slots of the trainer before them" * bool(slots[0])
    remedy = f"choose a rollout.tp that divides the slots of a node{after}, or that they divide"
    shares = on_each_node(config, nodes)
    for number, share in enumerate(shares):
        part = Part.of(number, dp=rollout.dp)
        if len(set(share)) > 1:
            own = sorted({nodes[slot] for slot in slots[number * rollout.tp :][: rollout.tp]})
            return [
                f"rollout.tp = {rollout.tp}: {part.name} would have {' + '.join(map(str, share))} of its tp ranks on nodes {own}, "
                f"which must share them equally; {remedy}"
            ]
        if len(share) != len(others := shares[number - part.dp_rank]):
            return [
                f"rollout.tp = {rollout.tp}: {part.name} would lie on {len(share)} nodes and dp rank 0 on {len(others)}, which "
                f"must be equally many; {remedy}"
            ]
    return []


def cpu_engines(config: Config, hf: dict[str, Any]) -> list[str]:
    """Says why vLLM's CPU kernels cannot serve the model in this layout."""
    tp, expert_parallel, name = config.rollout.tp, config.rollout.expert_parallel, config.model.path
    return _errors_of(
        lambda: vllm_limits.check_cpu_shapes(hf, tp=tp, expert_parallel=expert_parallel, name=name)
    )


def _names(config: Config, hf: dict[str, Any]) -> list[str]:
    """What the family's name tables say against the layouts of trainer and engines."""
    return [
        *layout_errors(hf, config.training.layout.sizes(), lora=config.training.lora),
        *_errors_of(lambda: _an_engine_rank(config, hf)),
    ]


def layout_errors(hf: dict[str, Any], layout: Layout, *, lora: LoraSection | None) -> list[str]:
    """What the family's name table, which has the last word on a trainer's layout, says of the parameters and adapters of
    the first rank of each stage: the others of a stage have equal shares of the same tensors."""
    family = family_of(hf)
    stages = [place for place in layout.places() if place.tp == place.cp == place.dp == 0]

    def ask() -> None:
        for place in stages:
            family.local_tensors(hf, layout, place)
            if lora is not None:
                adapters(family, hf, layout, place, lora)

    return _errors_of(ask)


def _an_engine_rank(config: Config, hf: dict[str, Any]) -> None:
    """Asks the family for the parameters of an engine's first rank: whether experts may be split is its matter."""
    rollout = config.rollout
    family_of(hf).engine_tensors(hf, Shard(rollout.tp, 0, rollout.tp if rollout.expert_parallel else 1))


def _errors_of(check: Callable[[], object]) -> list[str]:
    """The message of a check that raises ConfigError; empty where it passes."""
    try:
        check()
    except ConfigError as error:
        return [str(error)]
    return []
