"""Share what OLMoE and MiniMax-M2 have in common: queries and keys are normed over all heads at once."""

from __future__ import annotations

from typing import Any

from mrl.models import rows
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig, field, head_dim
from mrl.models.tensors import ParameterRows, Spec


class ProjectionNormed(Family):
    """A family with such norms; each family defines how an engine splits them over ranks."""

    def transformer_fields(self, hf: HfConfig) -> dict[str, Any]:
        return super().transformer_fields(hf) | {"qk_layernorm": True, "projection_norms": True}

    def attention_rows(self, hf: HfConfig, layer: str, spec: Spec) -> list[ParameterRows]:
        norms = [
            rows.norm(
                f"self_attention.{part}_layernorm", f"{layer}.self_attn.{part}_norm.weight", heads * width
            )
            for part, heads, width in normed_heads(hf)
        ]
        return [*super().attention_rows(hf, layer, spec), *norms]


def normed_heads(hf: HfConfig) -> list[tuple[str, int, int]]:
    """Return (part, number of heads, head width) of queries and of keys."""
    width = head_dim(hf)
    return [("q", field(hf, "num_attention_heads"), width), ("k", field(hf, "num_key_value_heads"), width)]
