"""The benchmark's models: published configurations, shrunk in layers, experts and vocabulary by `--scale`."""

from __future__ import annotations

import json
from typing import Any

from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.models.layout import Layout

FOLDERS = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "deepseek-v3": "DeepSeek-V3",
}
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "max_position_embeddings": 256, "attention_bias": False, "attention_dropout": 0.0,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
NAMES = ("tiny", *FOLDERS)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def config_of(name: str, *, scale: float, train: Layout) -> dict[str, Any]:
    """Return a model's HF config with a `scale` (0 to 1) of its layers, experts and vocabulary rows.

    They are rounded up for the layout; bytes shrink by about the square. Widths and `tiny` are not scaled."""
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale {scale} must be above 0 and at most 1")
    if name == "tiny":
        return dict(TINY)
    hf: dict[str, Any] = json.loads((CONFIGS / "models" / FOLDERS[name] / "config.json").read_text())
    if scale == 1:
        return hf
    layers = max(_share(hf["num_hidden_layers"], scale, 1), train.pp)
    hf |= {
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "vocab_size": _share(hf["vocab_size"], scale, 64 * train.tp),
        "mlp_only_layers": [layer for layer in hf.get("mlp_only_layers", []) if layer < layers],
    }
    if "first_k_dense_replace" in hf:
        hf["first_k_dense_replace"] = min(_share(hf["first_k_dense_replace"], scale, 1), layers - 1)
    for key in _EXPERTS:
        if key in hf:
            hf[key] = _share(hf[key], scale, max(train.ep, 8))
            hf["num_experts_per_tok"] = min(hf["num_experts_per_tok"], hf[key])
    return hf


def _share(value: int, scale: float, multiple: int) -> int:
    """Return scale x value, at least 1, rounded up to a multiple."""
    return -(-max(1, round(value * scale)) // multiple) * multiple
