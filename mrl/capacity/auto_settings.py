"""Replace `auto` by values for the hardware of a run or plan: types, kernels on GPUs, eager engines, KV cache
on CPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mrl.capacity.model_facts import find_facts
from mrl.capacity.rollout_memory import kv_token_bytes, state_bytes
from mrl.config.root import Config
from mrl.config.sections.training import TrainingSection
from mrl.errors import ConfigError
from mrl.models.facts import ModelSize

KV_CACHE_SHARE = 1 / 8
"""Largest share of a node's available memory that the KV caches of its engines take together."""
LEAST_KV_CACHE_BYTES = 64 << 20
KV_BLOCK_TOKENS = 128
"""Tokens of a block of the KV cache of vLLM on CPU; a sequence takes whole blocks."""


OF_THE_LOCK = frozenset({"transformer_engine"})
"""Packages of KERNEL_PACKAGES that requirements/cuda.lock has."""
KERNEL_PACKAGES = ("transformer_engine", "deep_ep", "fla")
"""Packages whose presence decides kernels of the trainer."""


def resolve_auto(
    config: Config, *, gpus: bool, memory_bytes: int, packages: Collection[str] = OF_THE_LOCK
) -> Config:
    """Return the configuration with values in place of `auto`; settings with a value keep it.

    On GPUs rollout.kv_cache_bytes stays: it is not read. Without a readable config.json, whose absence the
    checks of a run report, it stays on CPU too.

    Args:
        gpus: The slots are GPUs.
        memory_bytes: Available memory of a node; only read without GPUs.
        packages: Installed ones of KERNEL_PACKAGES; only read with GPUs.
    """
    training, rollout = config.training, config.rollout
    dtype, changes = "bfloat16" if gpus else "float32", dict[str, Any]()
    if rollout.dtype == "auto":
        changes["dtype"] = dtype if rollout.quantization == "none" else "bfloat16"
    if rollout.enforce_eager == "auto":
        changes["enforce_eager"] = not gpus
    if training.dtype == "auto":
        training = training.model_copy(update={"dtype": dtype})
    if gpus:
        training = training.model_copy(update=_kernels(config, training, packages))
    config = config.model_copy(update={"training": training, "rollout": rollout.model_copy(update=changes)})
    if gpus or rollout.kv_cache_bytes != "auto":
        return config
    try:
        size = kv_cache_bytes(config, memory_bytes)
    except ConfigError:
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_cache_bytes": size})})


def _kernels(config: Config, training: TrainingSection, packages: Collection[str]) -> dict[str, str]:
    """Return the trainer's kernel settings in place of `auto`, as models/megatron/layer_choice.py decides.

    They stay `auto` if the model is unknown, and with teachers, whose layers differ with their family.
    """
    facts = _facts(config)
    if facts is None or config.algorithm.distillation is not None:
        return {}
    values, wide = dict[str, str](), training.dtype == "float32"
    spec = training.spec
    if spec == "auto":
        fused = "transformer_engine" in packages and not facts.family.needs_own_attention
        values["spec"] = spec = "transformer_engine" if fused else "local"
    if training.dispatcher == "auto":
        spreads = spec == "transformer_engine" and training.layout.ep * training.layout.etp > 1 and not wide
        flex = spreads and training.router_dtype == "fp32" and "deep_ep" in packages
        values["dispatcher"] = "flex" if flex else "alltoall"
    if training.delta_net_kernels == "auto":
        fused = facts.delta_nets and not wide and "fla" in packages
        values["delta_net_kernels"] = "fla" if fused else "torch"
    return values


def kv_cache_bytes(config: Config, memory_bytes: int) -> int:
    """Return the bytes of an engine rank's KV cache on CPU, as rollout.kv_cache_bytes = auto describes them.

    Raises:
        ConfigError: The model is unknown.
    """
    facts, rollout = find_facts(config.model), config.rollout
    tokens = -(-config.model.max_length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS * rollout.max_num_seqs
    need = tokens * kv_token_bytes(facts, rollout) + state_bytes(facts, rollout)
    num_ranks = len(config.engine_slots)
    share = memory_bytes * KV_CACHE_SHARE / min(num_ranks, config.launch.slots_per_node or num_ranks)
    return max(LEAST_KV_CACHE_BYTES, min(need, int(share)))


def auto_values(config: Config, resolved: Config, *, gpus: bool) -> str:
    """Return a line about the values that `resolved` has in place of `auto` in `config`; empty without any.

    >>> auto_values(config, resolve_auto(config, gpus=False, memory_bytes=8 << 30), gpus=False)
    'CPU run: training in float32, engines in float32, eager engines, KV cache of 0.5 GiB per engine rank'
    """
    before, after = (
        (
            *(one.training.dtype, one.training.spec, one.training.dispatcher, one.training.delta_net_kernels),
            *(one.rollout.dtype, one.rollout.enforce_eager, one.rollout.kv_cache_bytes),
        )
        for one in (config, resolved)
    )
    training, spec, dispatcher, delta_nets, engines, is_eager, cache = after
    facts = _facts(config)
    texts = [
        f"training in {training}",
        f"{spec.replace('_', ' ')} layers",
        f"experts by {'DeepEP' if dispatcher == 'flex' else 'all-to-all'}"
        if facts and facts.num_experts
        else "",
        f"delta nets by {delta_nets}" if facts and facts.delta_nets else "",
        f"engines in {engines}",
        "eager engines" if is_eager else "compiled engines",
        f"KV cache of {cache / 2**30:.2g} GiB per engine rank" if isinstance(cache, int) else "",
    ]
    words = ", ".join(
        text for text, old, new in zip(texts, before, after, strict=True) if old != new and text
    )
    return words and f"{'GPU' if gpus else 'CPU'} run: {words}"


def _facts(config: Config) -> ModelSize | None:
    """Return the facts of the policy's model; None if it is unknown."""
    try:
        return find_facts(config.model)
    except ConfigError:
        return None
