"""Norm queries or keys over all heads of a token at once (OLMoE, MiniMax-M2); Megatron norms one head."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


class ProjectionNorm(torch.nn.Module):
    """Root-mean-square norm over all `heads` of a token, split over tensor-parallel ranks.

    The mean square is summed over the ranks, in float32. With more ranks than heads, neighbouring ranks have
    the same head, and each counts for its part. `weight` is [heads x width] and whole on every rank; its
    gradient is summed over the ranks, as that of other norms is.
    """

    def __init__(
        self, *, heads: int, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any
    ) -> None:
        """`hidden_size` is the width of one head, as Megatron's attention passes it."""
        super().__init__()
        self.heads, self.width, self.eps = heads, hidden_size, eps
        self.weight: Any = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Norm x [..., own heads, width]."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        wide, num_own = x.float(), x.shape[-2]
        squares = wide.square().sum((-2, -1), keepdim=True)
        if ranks > 1:
            squares = _summed(squares) * (self.heads / (num_own * ranks))
        normed = wide * torch.rsqrt(squares / (self.heads * self.width) + self.eps)
        first = parallel_state.get_tensor_model_parallel_rank() * self.heads // ranks
        return self.weight.view(self.heads, self.width)[first : first + num_own] * normed.to(x.dtype)


def _summed(x: Tensor) -> Tensor:
    """Sum over the tensor-parallel ranks; the backward pass sums their gradients too."""
    return reduce_from_tensor_model_parallel_region(copy_to_tensor_model_parallel_region(x))
