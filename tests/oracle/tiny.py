"""The tiny models that the oracle converts: every family of tests/tiny_models.py, small enough for a committed table."""

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
    """The layouts in which the oracle converts a family."""
    if family == "minimax_m2":  # the bridge splits its norms of queries and keys on GPUs only
        return "one", "dp2-pp2-ep2"
    return "one", "tp2-pp2-ep2" if "num_experts_per_tok" in FAMILIES[family][1] else "tp2-pp2"


def changes(family: str) -> dict[str, Any]:
    """Two layers and four experts; as many heads of keys as of queries where the oracle's norms know no others."""
    own, result = FAMILIES[family][1], {"num_hidden_layers": 2}
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    result |= {name: 4 for name in counts if name in own}
    if "n_group" in own:
        groups = min(own["n_group"], 2)
        result |= {"n_group": groups, "topk_group": 1, "num_experts_per_tok": 2}
    if "full_attention_interval" in own:
        result["full_attention_interval"] = 2
    if own.get("rope_parameters") is LLAMA3:  # of which Megatron has the original length as a constant
        result |= lengthened(LLAMA3, factor=8.0, original=8192)
    if family == "gpt_oss":  # of which the bridge has these as constants
        result |= lengthened(own["rope_parameters"], factor=32.0, original=4096)
    if "rotary_dim" in own:  # which the transformers of the oracle's environment does not read
        share = own["rotary_dim"] / COMMON["head_dim"]
        result["rope_parameters"] = PLAIN | {"partial_rotary_factor": share}
    if family == "olmoe":
        result["num_key_value_heads"] = 4
    return result


def lengthened(rotary: dict[str, Any], *, factor: float, original: int) -> dict[str, Any]:
    """The keys of config.json of a rotary embedding that reaches `factor` times as far as it was made for."""
    lengths = {"factor": factor, "original_max_position_embeddings": original}
    return {"rope_parameters": rotary | lengths, "max_position_embeddings": int(factor) * original}


def config(family: str) -> dict[str, Any]:
    """config.json of the tiny model; of its model of text, where it has one of images beside it."""
    found = tiny_config(family, **changes(family))
    text = getattr(found, "text_config", found).to_dict()
    return text | ({"model_type": family} if family == "kimi_k2" else {})


def write(folder: Path, family: str) -> Path:
    """A folder with random weights, of text alone."""
    write_model(folder, family, **changes(family))
    if family in BESIDE_IMAGES:
        weights = text_alone(load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        architecture = {"architectures": [f"{FAMILIES[family][0]}ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config(family) | architecture))
    return folder


def write_numbered(folder: Path, family: str) -> Path:
    """A folder in which no two elements of all tensors are equal: they are numbered, tensors by name, from 0."""
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
