"""Seed-OSS: grouped-query attention with biases of q, k and v, gated MLPs.

Source: transformers 5.19, models/seed_oss. vLLM 0.32 serves it through transformers' class, and fuses the
same projections as in its own.
"""

from __future__ import annotations

from mrl.models.family import Family
from mrl.models.hf_config import HfConfig

_DROPOUT = (None, 0, 0.1)
"""Published folders ask for 0.1. Training applies none: the engine that samples has none."""


class SeedOss(Family):
    """Seed-OSS."""

    model_type = "seed_oss"
    implemented = {
        "attention_bias": (None, False, True),
        "attention_out_bias": (None, False),
        "mlp_bias": (None, False),
        "attention_dropout": _DROPOUT,
        "residual_dropout": _DROPOUT,
    }

    def qkv_bias(self, hf: HfConfig) -> bool:
        return bool(hf.get("attention_bias", True))
