"""Stand-ins that Megatron-Bridge's models need without a GPU; in the oracle's process only.

Transformer Engine's modules are the stand-in's, so that parameters have the names that the bridge maps.
Attention is Megatron's own, which takes float32, sinks and windows, but no packed segments.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.support.transformer_engine import FOLDER


def install() -> None:
    """Prepare this process before it imports megatron.bridge."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = (
        "0"  # Megatron asks for it where delta nets are to be torch's
    )
    sys.path.insert(0, str(FOLDER))
    from mrl.cpu import megatron_calls

    megatron_calls.run_on_cpu()
    import transformer_engine.pytorch as engine

    engine.fp8_model_init = None  # type: ignore[attr-defined]  # Megatron-FSDP imports it
    _replace_attention()
    _replace_delta_rule()


def _replace_attention() -> None:
    import megatron.core.extensions.transformer_engine as extensions
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from torch import Tensor

    class TEDotProductAttention(DotProductAttention):
        """Megatron's own, with values of another width than keys; the bridge splits sinks by this name."""

        def __init__(
            self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            kwargs.pop("num_splits", None)
            super().__init__(*args, **kwargs)
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            kwargs.pop("num_splits", None)
            return super().forward(query, key.contiguous(), value.contiguous(), *args, **kwargs)

    extensions.TEDotProductAttention = TEDotProductAttention  # type: ignore[misc]


def _replace_delta_rule() -> None:
    """Stand in for flash-linear-attention, which Megatron's delta nets require when they are built."""
    import megatron.core.ssm.gated_delta_net.common as common
    import torch

    def unit_length(x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    common.HAVE_FLA, common.l2norm = True, unit_length
