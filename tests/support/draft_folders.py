"""Tiny folders with a draft head (multi-token prediction), by the published names of their families."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_drafts(folder: Path, *, seed: int = 5) -> dict[str, torch.Tensor]:
    """Add a draft head like the folder's last layer to a folder; return its tensors."""
    torch.manual_seed(seed)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    count, width = config["num_hidden_layers"], config["hidden_size"]
    last, is_qwen = f"model.layers.{count - 1}.", config["model_type"] == "qwen3_next"
    layer = "mtp.layers.0." if is_qwen else f"model.layers.{count}."
    head = "mtp." if is_qwen else layer
    norm = weights["model.norm.weight"]
    final = norm + (0.1 * torch.randn(width)).to(norm.dtype)
    if is_qwen:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        copies: dict[str, torch.Tensor] = {}
    else:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    norms = [0.1 * torch.randn(width) + (0 if is_qwen else 1) for _ in range(2)]
    values = [*norms, 0.1 * torch.randn(width, 2 * width), final]
    dtype = final.dtype
    drafts = {f"{head}{name}.weight": value.to(dtype) for name, value in zip(names, values, strict=True)}
    drafts |= {f"{layer}{name}.weight": weights[f"{model}.weight"].clone() for name, model in copies.items()}
    for name, value in weights.items():
        if name.startswith(last):
            noise = (0.05 * torch.randn(value.shape)).to(value.dtype)
            drafts[layer + name.removeprefix(last)] = value + noise
    save_file(weights | drafts, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return drafts
