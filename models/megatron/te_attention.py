"""Transformer Engine's fused attention over packed sequences, where it is installed; not run on a GPU yet.

The rotary embedding stays packed_attention's, so that both paths see the same angles; only the core differs. Megatron
passes what TEDotProductAttention.__init__ takes. With context parallelism the kernels pass keys and values round the
ranks themselves; they take this rank's chunks of every segment (zigzag.py) and the bounds of whole segments.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mrl.models.megatron.packed_attention import PackedAttention
from mrl.models.megatron.packed_segments import PackedSegments
from mrl.models.megatron.rotary import rotate

_SHARED = [part.name for part in dataclasses.fields(PackedSeqParams)]


class FusedPackedAttention(torch.nn.Module):
    """Core attention for Megatron's self attention: rotary embedding (latent attention has done it), then Transformer
    Engine's THD kernels, which take values of another width."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__()
        self.core = TEDotProductAttention(config, **kwargs)
        self.rotates = not config.multi_latent_attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSegments,
        **kwargs: Any,
    ) -> Tensor:
        """query [N, H, D], key [N, G, D], value [N, G, V] -> [N, H x V]."""
        packed = packed_seq_params
        if self.rotates:
            query, key = (rotate(x, packed.cos, packed.sin) for x in (query, key))
        segments = PackedSeqParams(**{name: getattr(packed, name) for name in _SHARED})
        return self.core(query, key, value, attention_mask, packed_seq_params=segments, **kwargs)


def core_attention(device: torch.device) -> type[torch.nn.Module]:
    """The attention of this device: Transformer Engine's on CUDA where it is installed, our own elsewhere."""
    fused = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    return FusedPackedAttention if fused else PackedAttention
