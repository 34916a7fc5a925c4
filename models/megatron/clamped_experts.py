"""Run gpt-oss's experts: biases, a clamped activation, and interleaved gate and up rows, as in its folders
and vLLM.

models/kernels/experts.py does the computation; products and checkpoints are those of expert_layer.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.models.kernels.experts import Biases, Clamped, grouped_clamped
from mrl.models.megatron.expert_layer import GroupedExperts
from mrl.models.megatron.model_config import ModelConfig


class ClampedExperts(GroupedExperts):
    """Experts e = 0..E-1 of one rank, whole (Megatron refuses biases with etp > 1): `weight1` [E * 2I, H] has
    interleaved gate and up rows, `weight2` is [E * H, I], `bias1` [E * 2I] and `bias2` [E * H]."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(num_local_experts, config, **kwargs)
        assert isinstance(config, ModelConfig) and config.clamped_swiglu is not None
        self.activation = Clamped(*config.clamped_swiglu)
        self.bias1, self.bias2 = (
            torch.nn.Parameter(torch.zeros(len(weight), dtype=weight.dtype, device=weight.device))
            for weight in (self.weight1, self.weight2)
        )

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Compute as GroupedExperts does."""
        count = self.num_local_experts
        first, second = (weight.view(count, -1, weight.shape[-1]) for weight in (self.weight1, self.weight2))
        biases = Biases(self.bias1.view(count, -1), self.bias2.view(count, -1))
        out = grouped_clamped(hidden, first, second, biases, tokens_per_expert, probs, self.activation)
        return out, None

    def _stored_as(self) -> dict[str, tuple[str, int]]:
        parts = ("weight", "bias")
        return {f"{part}{n}": (f"linear_fc{n}.{part}", 0) for part in parts for n in (1, 2)}
