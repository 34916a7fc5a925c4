"""Tiny multimodal folders in their published forms: text and image models, Qwen's experts of a layer in two
tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_QWEN: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16,
    "patch_size": 4,
}  # fmt: skip
_ONE_LAYER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES: dict[str, dict[str, Any]] = {
    "Qwen3VL": _QWEN | {"deepstack_visual_indexes": [0]},
    "Qwen3VLMoe": _QWEN | {"deepstack_visual_indexes": [0]},
    "Mistral3": _ONE_LAYER | {"model_type": "pixtral", "head_dim": 32, "image_size": 28, "patch_size": 14},
    "Kimi_K25": _ONE_LAYER | {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
}
"""Prefix of transformers' classes -> fields of the image model; Qwen3.5's if it is not here."""
IMAGE_MODELS = ("model.visual.", "vision_tower.", "multi_modal_projector.", "mm_projector.")
"""Prefixes of tensors that are not of text models."""
_RENAMED = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
}
"""Names that transformers 5.19 writes of Kimi-K2.5 -> published names."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def config_beside_images(prefix: str, fields: dict[str, Any]) -> Any:
    import transformers

    images = IMAGES.get(prefix, _QWEN)
    if "depth" in images:
        images = images | {"out_hidden_size": fields["hidden_size"]}
    tied = fields["tie_word_embeddings"]
    kind = getattr(transformers, f"{prefix}Config")
    top = {"projection_hidden_size": images["hidden_size"]} if prefix == "Kimi_K25" else {}
    return kind(text_config=fields, vision_config=images, tie_word_embeddings=tied, **top)


def publish_names(folder: Path) -> None:
    """Rewrite a folder with the published names of its tensors, and Kimi's of its text model."""
    path = folder / "model.safetensors"
    weights = {}
    for name, values in load_file(path).items():
        start = next((start for start in _RENAMED if name.startswith(start)), "")
        weights[_RENAMED.get(start, "") + name.removeprefix(start)] = values
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "kimi_k2"
    (folder / "config.json").write_text(json.dumps(config))


def pack_experts(folder: Path) -> None:
    """Rewrite a folder so that it stores a layer's experts together."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    parts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in [name for name in weights if _EXPERT.fullmatch(name)]:
        layer, number, part = _EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]
        stored = f"{layer}.{'down' if part == 'down' else 'gate_up'}_proj"
        parts.setdefault(stored, {})[int(number), part] = weights.pop(name)
    for name, matrices in parts.items():
        numbers = sorted({number for number, _ in matrices})
        kinds = ("down",) if "down_proj" in name else ("gate", "up")
        weights[name] = torch.stack([torch.cat([matrices[n, kind] for kind in kinds]) for n in numbers])
    save_file(weights, path, metadata={"format": "pt"})


def turn_experts(folder: Path) -> None:
    """Rewrite a folder so that packed experts are transposed, as Qwen3-VL is published."""
    path = folder / "model.safetensors"
    weights = {
        name: values.transpose(1, 2).contiguous() if ".experts." in name else values
        for name, values in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def unpack_experts(folder: Path) -> None:
    """Rewrite a folder so that it stores each expert by itself, as published float8 folders do."""
    path = folder / "model.safetensors"
    weights = {}
    for name, values in load_file(path).items():
        weights |= _each_expert(name, values)
    save_file(weights, path, metadata={"format": "pt"})


def _each_expert(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a packed tensor's experts by name; other tensors as they are."""
    layer, packed, part = name.rpartition(".experts.")
    if not packed or part not in ("gate_up_proj", "down_proj"):
        return {name: values}
    kinds = ("down",) if part == "down_proj" else ("gate", "up")
    return {
        f"{layer}.experts.{number}.{kind}_proj.weight": rows.contiguous()
        for number, expert in enumerate(values)
        for kind, rows in zip(kinds, expert.chunk(len(kinds)), strict=True)
    }


def text_alone(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the text model's tensors, named and split per expert as in a folder without images."""
    turned = any(".deepstack_" in name for name in weights)  # only Qwen3-VL has such modules
    result = {}
    for name, values in weights.items():
        text = name.replace("model.language_model.", "model.").removeprefix("language_model.")
        if name.startswith(IMAGE_MODELS):
            continue
        values = values.transpose(1, 2) if turned and ".experts." in name else values
        result |= _each_expert(text, values) if text != name else {name: values}
    return result
