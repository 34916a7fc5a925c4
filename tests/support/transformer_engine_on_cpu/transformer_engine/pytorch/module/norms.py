"""Norms over the last dimension."""

from collections.abc import Iterable

import torch
import torch.nn.functional as functional
from torch import Tensor


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: torch.device | str = "cuda",
        **kwargs: object,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        size = normalized_shape if normalized_shape is not None else hidden_size
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(size, dtype=params_dtype, device=device))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return functional.rms_norm(x, weight.shape, weight, self.eps)


class LayerNorm(torch.nn.Module):
    """Unused by the models here."""
