"""The norm of queries or keys over all heads of a token at once (OLMoE, MiniMax-M2), which Megatron has not.

Its own norms of queries and keys see one head at a time.
"""

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
    """Root-mean-square norm over all `heads` of a token, of which a tensor-parallel rank has some.

    The mean square is summed over the ranks, in float32. Where ranks are more than heads, neighbours hold the
    same head, and each counts for its part. `weight` is [heads x width] and whole on every rank; its gradient
    is summed over the ranks as that of other norms is.
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
        """x [..., own heads, width], normed."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        wide, own = x.float(), x.shape[-2]
        squares = wide.square().sum((-2, -1), keepdim=True)
        if ranks > 1:
            squares = _summed(squares) * (self.heads / (own * ranks))
        normed = wide * torch.rsqrt(squares / (self.heads * self.width) + self.eps)
        first = parallel_state.get_tensor_model_parallel_rank() * self.heads // ranks
        return self.weight.view(self.heads, self.width)[first : first + own] * normed.to(x.dtype)


def _summed(x: Tensor) -> Tensor:
    """The sum over the tensor-parallel ranks; backward, their gradients are summed too."""
    return reduce_from_tensor_model_parallel_region(copy_to_tensor_model_parallel_region(x))
