"""What vLLM's CPU kernels cannot run, and what they run right in another form, found from config.json before an
engine starts. Pure."""

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
"""vLLM 0.32: width of a head in its CPU attention, and of both sides of its CPU expert kernel."""
_CPU_LATENT = 576
"""vLLM 0.32: width of latent attention's cache on CPU, compressed part and rotary part together."""


def cpu_overrides(model_path: str) -> dict[str, Any]:
    """What vLLM's reading of a folder's config.json is overridden with on CPU: latent attention's plain rotary
    embedding as YaRN of factor 1, which is the same angles.

    vLLM 0.32 turns latent attention's parts wrongly in its plain CPU kernel (log-probs 2e-3 off and more), and
    rightly in YaRN's.
    """
    config = _config(model_path)
    if not config.get("kv_lora_rank") or rope.kind(config) != "default":
        return {}
    theta = rope.parameters(config).get("rope_theta") or field(config, "rope_theta")
    length = {"original_max_position_embeddings": field(config, "max_position_embeddings")}
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": theta, "factor": 1.0, **length}}


def attention_override(model_path: str) -> dict[str, Any]:
    """The field of vLLM's EngineArgs by which latent attention is the same on every CPU: where there is AMX, vLLM 0.32 takes
    kernels for it that know bfloat16 and widths of 32 alone."""
    return {"attention_backend": "CPU_MLA"} if _config(model_path).get("kv_lora_rank") else {}


def check_cpu(model_path: str, *, tp: int, expert_parallel: bool = False) -> None:
    """ConfigError when the shapes of a model's folder do not fit vLLM's CPU kernels at this tensor-parallel size."""
    config = _config(model_path)
    check_cpu_shapes(config, tp=tp, expert_parallel=expert_parallel, name=model_path)


def _config(model_path: str) -> dict[str, Any]:
    return language_model(json.loads((Path(model_path) / "config.json").read_text()))


def check_cpu_shapes(config: dict[str, Any], *, tp: int, expert_parallel: bool, name: str) -> None:
    """ConfigError when a config.json asks for shapes that vLLM's CPU kernels lack; `name` says which model it is."""
    family = FAMILIES.get(config.get("model_type", ""))
    heads, hidden = config.get("num_attention_heads", 1), config.get("hidden_size", 0)
    head_dim = config.get("head_dim") or hidden // heads
    problems = []
    if latent := config.get("kv_lora_rank"):
        if latent + config["qk_rope_head_dim"] != _CPU_LATENT:
            problems.append(
                f"kv_lora_rank + qk_rope_head_dim = {latent} + {config['qk_rope_head_dim']} (only {_CPU_LATENT})"
            )
    elif head_dim % _CPU_MULTIPLE:
        problems.append(f"head_dim = {head_dim}")
    size_key = family.expert_width_key if family else Family.expert_width_key
    if expert_size := config.get(size_key):
        slices = 1 if expert_parallel else tp
        if expert_size % (_CPU_MULTIPLE * slices):
            # vLLM pads narrower experts at the first load, and a reload no longer fits the padded kernel weights.
            problems.append(
                f"{size_key} = {expert_size} at rollout.tp = {tp} ({expert_size / slices:g} a rank)"
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
