"""Tiny folders with a draft head (multi-token prediction), by the published names of their families."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mrl.samples import TrainBatch
from tests.tiny_models import reference_model


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
        copied: dict[str, str] = {}
    else:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        copied = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    norms = [0.1 * torch.randn(width) + (0 if is_qwen else 1) for _ in range(2)]
    values = [*norms, 0.1 * torch.randn(width, 2 * width), final]
    dtype = final.dtype
    drafts = {f"{head}{name}.weight": value.to(dtype) for name, value in zip(names, values, strict=True)}
    drafts |= {f"{layer}{name}.weight": weights[f"{model}.weight"].clone() for name, model in copied.items()}
    for name, value in weights.items():
        if name.startswith(last):
            noise = (0.05 * torch.randn(value.shape)).to(value.dtype)
            drafts[layer + name.removeprefix(last)] = value + noise
    save_file(weights | drafts, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return drafts


class ReferenceDraft(torch.nn.Module):
    """The draft head of a folder of DeepSeek's form, of transformers' layer and plain torch."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        """Load it; `scratch` is a new folder, in which the head's layer is one of the model's."""
        super().__init__()
        self.policy = reference_model(folder).requires_grad_(False)
        config, weights = self.policy.config, load_file(folder / "model.safetensors")
        count = config.num_hidden_layers
        deeper = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": count + 1}
        shutil.copytree(folder, scratch, ignore=shutil.ignore_patterns("*.safetensors"))
        (scratch / "config.json").write_text(json.dumps(deeper))
        prefix = f"model.layers.{count}."
        self._eps = config.rms_norm_eps
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        self.enorm, self.hnorm, self.eh_proj, self.norm = (
            torch.nn.Parameter(weights[f"{prefix}{name}.weight"]) for name in names
        )
        others = tuple(prefix + name for name in (*names, "embed_tokens", "shared_head"))
        kept = {name: value for name, value in weights.items() if not name.startswith(others)}
        save_file(kept, scratch / "model.safetensors", metadata={"format": "pt"})
        self.layer: Any = reference_model(scratch).model.layers[count]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [n - 2, V] of tokens [n] from the third on."""
        model = self.policy.model
        hidden = model(tokens[None, :-1]).last_hidden_state
        embedded = model.embed_tokens(tokens[None, 1:]).clone()
        embedded[:, 0] = 0  # as in vLLM
        both = [self._normed(embedded, self.enorm), self._normed(hidden, self.hnorm)]
        states = torch.cat(both, dim=-1) @ self.eh_proj.T
        positions = torch.arange(states.shape[1])[None]
        mask = torch.full((states.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        angles = model.rotary_emb(states, positions)
        states = self.layer(states, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        states = states[0] if isinstance(states, tuple) else states
        return (self._normed(states, self.norm) @ self.policy.lm_head.weight.T)[0, :-1]

    def logprobs(self, batch: TrainBatch, *, temperature: float) -> torch.Tensor:
        """Return [N] log-probs of a batch's tokens, 0 for the first two of each segment."""
        parts = []
        for tokens in np.split(batch.tokens, batch.cu_seqlens[1:-1]):
            ids = torch.from_numpy(tokens).long()
            log_p = (self(ids) / temperature).log_softmax(-1)
            parts += [torch.zeros(2), log_p.gather(1, ids[2:, None])[:, 0]]
        return torch.cat(parts)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self._eps)
