"""Replace `auto` by values for the hardware of a run or plan: types, eager engines, KV cache on CPU."""

from __future__ import annotations

from typing import Any

from mrl.capacity.model_facts import find_facts
from mrl.capacity.rollout_memory import kv_token_bytes, state_bytes
from mrl.config.root import Config
from mrl.errors import ConfigError

KV_CACHE_SHARE = 1 / 8
"""Largest share of a node's available memory that the KV caches of its engines take together."""
LEAST_KV_CACHE_BYTES = 64 << 20
KV_BLOCK_TOKENS = 128
"""Tokens of a block of the KV cache of vLLM on CPU; a sequence takes whole blocks."""


def resolve_auto(config: Config, *, gpus: bool, memory_bytes: int) -> Config:
    """Return the configuration with values in place of `auto`; settings with a value keep it.

    On GPUs rollout.kv_cache_bytes stays: it is not read. Without a readable config.json, whose absence the
    checks of a run report, it stays on CPU too.

    Args:
        gpus: The slots are GPUs.
        memory_bytes: Available memory of a node; only read without GPUs.
    """
    training, rollout = config.training, config.rollout
    dtype, changes = "bfloat16" if gpus else "float32", dict[str, Any]()
    if rollout.dtype == "auto":
        changes["dtype"] = dtype if rollout.quantization == "none" else "bfloat16"
    if rollout.enforce_eager == "auto":
        changes["enforce_eager"] = not gpus
    if training.dtype == "auto":
        training = training.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"training": training, "rollout": rollout.model_copy(update=changes)})
    if gpus or rollout.kv_cache_bytes != "auto":
        return config
    try:
        size = kv_cache_bytes(config, memory_bytes)
    except ConfigError:
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_cache_bytes": size})})


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
        (one.training.dtype, one.rollout.dtype, one.rollout.enforce_eager, one.rollout.kv_cache_bytes)
        for one in (config, resolved)
    )
    training, engines, is_eager, cache = after
    texts = [
        f"training in {training}",
        f"engines in {engines}",
        "eager engines" if is_eager else "compiled engines",
        f"KV cache of {cache / 2**30:.2g} GiB per engine rank" if isinstance(cache, int) else "",
    ]
    words = ", ".join(text for text, old, new in zip(texts, before, after, strict=True) if old != new)
    return words and f"{'GPU' if gpus else 'CPU'} run: {words}"
