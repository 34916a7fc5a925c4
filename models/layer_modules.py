"""Modules that the layer specs use in place of Transformer Engine's or Apex's: the norm and the router.

Neither knows a family. The attention is in packed_attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    The torch norm that megatron falls back to refuses sequence parallelism; this one marks its weight, so that its
    gradient is summed over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight: Any = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RecordingRouter(TopKRouter):
    """Megatron's top-k router that can also record how close each decision was.

    While `margins` is a list, each call appends [tokens] float32: the gap between the k-th and the (k+1)-th largest
    logit. A gap near 0 means that rounding may choose another expert.
    """

    margins: list[Tensor] | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.margins is not None:
            rows = logits.detach().view(-1, logits.shape[-1])
            if self.topk < rows.shape[-1]:
                top = rows.topk(self.topk + 1, dim=-1).values
                self.margins.append((top[:, -2] - top[:, -1]).float())
        return super().routing(logits, padding_mask)
