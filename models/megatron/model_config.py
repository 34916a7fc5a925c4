"""Define Megatron's model settings with additions for our own modules."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclasses.dataclass
class ModelConfig(TransformerConfig):
    """Settings of a model with grouped-query attention."""

    projection_norms: bool = False
    """With qk_layernorm: norm over all heads of a token at once (projection_norm.py)."""
    clamped_swiglu: tuple[float, float] | None = None
    """(alpha, limit) of the activation of experts with biases (clamped_experts.py); None for others."""
