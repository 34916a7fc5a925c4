"""The oracle's tiny models: every family of tests/tiny_models.py, small enough for a committed table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mrl.models.layout import Layout
from tests.support.image_folders import text_alone
from tests.tiny_models import BESIDE_IMAGES, COMMON, FAMILIES, LLAMA3, PLAIN, tiny_config, write_model

LAYOUTS = {
    "one": Layout(),
    "tp2-pp2": Layout(tp=2, pp=2),
    "tp2-pp2-ep2": Layout(tp=2, pp=2, ep=2),
    "dp2-pp2-ep2": Layout(dp=2, pp=2, ep=2),
}


def layouts(family: str) -> tuple[str, str]:
    if family == "minimax_m2":  # the bridge splits its norms of queries and keys on GPUs only
        return "one", "dp2-pp2-ep2"
    return "one", "tp2-pp2-ep2" if "num_experts_per_tok" in FAMILIES[family][1] else "tp2-pp2"


def changes(family: str) -> dict[str, Any]:
    """Two layers and four experts; as many key heads as query heads if the oracle's norms need it."""
    defaults, result = FAMILIES[family][1], {"num_hidden_layers": 2}
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    result |= {name: 4 for name in counts if name in defaults}
    if "n_group" in defaults:
        groups = min(defaults["n_group"], 2)
        result |= {"n_group": groups, "topk_group": 1, "num_experts_per_tok": 2}
    if "full_attention_interval" in defaults:
        result["full_attention_interval"] = 2
    if defaults.get("rope_parameters") is LLAMA3:  # of which Megatron has the original length as a constant
        result |= lengthened(LLAMA3, factor=8.0, original=8192)
    if family == "gpt_oss":  # of which the bridge has these as constants
        result |= lengthened(defaults["rope_parameters"], factor=32.0, original=4096)
    if "rotary_dim" in defaults:  # which the transformers of the oracle's environment does not read
        share = defaults["rotary_dim"] / COMMON["head_dim"]
        result["rope_parameters"] = PLAIN | {"partial_rotary_factor": share}
    if family == "olmoe":
        result["num_key_value_heads"] = 4
    return result


def lengthened(rotary: dict[str, Any], *, factor: float, original: int) -> dict[str, Any]:
    """Return config.json's keys of a rotary embedding that reaches `factor` times its original length."""
    lengths = {"factor": factor, "original_max_position_embeddings": original}
    return {"rope_parameters": rotary | lengths, "max_position_embeddings": int(factor) * original}


def config(family: str) -> dict[str, Any]:
    """Return config.json of the tiny model, or of its text model if it also has an image model."""
    full = tiny_config(family, **changes(family))
    text = getattr(full, "text_config", full).to_dict()
    return text | ({"model_type": family} if family == "kimi_k2" else {})


def write(folder: Path, family: str) -> Path:
    """Write a folder with random weights of the text model alone."""
    write_model(folder, family, **changes(family))
    if family in BESIDE_IMAGES:
        weights = text_alone(load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        architecture = {"architectures": [f"{FAMILIES[family][0]}ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config(family) | architecture))
    return folder


def write_numbered(folder: Path, family: str) -> Path:
    """Write a folder in which all elements differ: they are numbered from 0, tensors by name."""
    path = write(folder, family) / "model.safetensors"
    tensors, start = load_file(path), 0
    for name in sorted(tensors):
        tensors[name] = numbered(tensors[name].shape, start)
        start += tensors[name].numel()
    assert start < 2**24, "float32 does not tell them apart"
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def numbered(shape: Any, start: int) -> torch.Tensor:
    """float32 [*shape] start, start + 1, ..."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
