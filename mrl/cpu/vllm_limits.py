"""Limits of vLLM's CPU kernels, and overrides for shapes that they run only in another form, from config.json
before an engine starts. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.models import rope
from mrl.models.families import FAMILIES
from mrl.models.family import Family
from mrl.models.hf_config import field, language_model

_CPU_MULTIPLE = 32
"""vLLM 0.32: head width in CPU attention and both sides of the CPU expert kernel are multiples of it."""
_CPU_LATENT = 576
"""vLLM 0.32: width of latent attention's cache on CPU, compressed plus rotary part."""


def cpu_overrides(model_path: str) -> dict[str, Any]:
    """Return overrides of a folder's config.json for vLLM on CPU.

    Plain rotary embeddings of latent attention become YaRN of factor 1, which has the same angles: vLLM
    0.32's plain CPU kernel rotates incorrectly (log-probs off by 2e-3 and more), YaRN's correctly.
    """
    config = _config(model_path)
    if not config.get("kv_lora_rank") or rope.kind(config) != "default":
        return {}
    theta = rope.rope_settings(config).get("rope_theta") or field(config, "rope_theta")
    length = {"original_max_position_embeddings": field(config, "max_position_embeddings")}
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": theta, "factor": 1.0, **length}}


def attention_override(model_path: str) -> dict[str, Any]:
    """Return the EngineArgs field that makes latent attention equal on every CPU: with AMX, vLLM 0.32 uses
    kernels for it that support only bfloat16 and widths of 32."""
    return {"attention_backend": "CPU_MLA"} if _config(model_path).get("kv_lora_rank") else {}


def check_cpu(model_path: str, *, tp: int, expert_parallel: bool = False) -> None:
    """Raise ConfigError if a model folder's shapes do not fit vLLM's CPU kernels at this `tp`."""
    config = _config(model_path)
    check_cpu_shapes(config, tp=tp, expert_parallel=expert_parallel, name=model_path)


def _config(model_path: str) -> dict[str, Any]:
    return language_model(json.loads((Path(model_path) / "config.json").read_text()))


def check_cpu_shapes(config: dict[str, Any], *, tp: int, expert_parallel: bool, name: str) -> None:
    """Raise ConfigError if a config.json has shapes that vLLM's CPU kernels lack; `name` is the model's."""
    family = FAMILIES.get(config.get("model_type", ""))
    heads, hidden = config.get("num_attention_heads", 1), config.get("hidden_size", 0)
    head_dim = config.get("head_dim") or hidden // heads
    problems = []
    if latent := config.get("kv_lora_rank"):
        if latent + config["qk_rope_head_dim"] != _CPU_LATENT:
            problems.append(
                f"kv_lora_rank + qk_rope_head_dim = {latent} + {config['qk_rope_head_dim']} "
                f"(only {_CPU_LATENT})"
            )
    elif head_dim % _CPU_MULTIPLE:
        problems.append(f"head_dim = {head_dim}")
    size_key = family.expert_width_key if family else Family.expert_width_key
    if expert_size := config.get(size_key):
        slices = 1 if expert_parallel else tp
        if expert_size % (_CPU_MULTIPLE * slices):
            # vLLM pads narrower experts at the first load; a reload then does not fit the padded weights.
            problems.append(
                f"{size_key} = {expert_size} at rollout.tp = {tp} ({expert_size / slices:g} per rank)"
            )
        if hidden % _CPU_MULTIPLE:
            problems.append(f"hidden_size = {hidden}")
    if heads % tp:
        problems.append(f"num_attention_heads = {heads} at rollout.tp = {tp}")
    if problems:
        raise ConfigError(
            f"vLLM's CPU kernels cannot run {name}: {', '.join(problems)}; widths must be multiples of "
            f"{_CPU_MULTIPLE} on every rank (heads a multiple of tp)"
        )
