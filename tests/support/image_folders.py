"""Tiny folders in Qwen3.5's published form: text and image models, a layer's experts in two tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

IMAGES: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16,
    "patch_size": 4,
}  # fmt: skip
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def config_beside_images(prefix: str, fields: dict[str, Any]) -> Any:
    import transformers

    images = IMAGES | {"out_hidden_size": fields["hidden_size"]}
    tied = fields["tie_word_embeddings"]
    kind = getattr(transformers, f"{prefix}Config")
    return kind(text_config=fields, vision_config=images, tie_word_embeddings=tied)


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
    result = {}
    for name, values in weights.items():
        text = name.replace("model.language_model.", "model.")
        if not name.startswith("model.visual."):
            result |= _each_expert(text, values) if text != name else {name: values}
    return result
