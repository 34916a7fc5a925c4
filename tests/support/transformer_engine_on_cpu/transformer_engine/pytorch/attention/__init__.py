"""Attention of packed segments."""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        assert not attention_dropout and window_size is None and softmax_type == "vanilla"
        if cp_group is not None:
            raise NotImplementedError("the stand-in has no context parallelism")
        widths = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.key_width, self.value_width = widths
        self.scale = softmax_scale if softmax_scale is not None else widths[0] ** -0.5

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: None = None,
        cu_seqlens_kv_padded: None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: None = None,
    ) -> Tensor:
        """query [N, H, D], key [M, G, D], value [M, G, D] -> [N, H x D], causal inside each segment.

        With the mask padding_causal_bottom_right a segment's queries are the last of its keys' positions.
        """
        tensors = query_layer, key_layer, value_layer
        assert qkv_format == "thd" and attention_mask is None
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None
        sizes = [bounds.diff().tolist() for bounds in (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_kv)]
        assert (max_seqlen_q, max_seqlen_kv) == (max(sizes[0]), max(sizes[1]))
        if attn_mask_type == "padding_causal":
            assert sizes[0] == sizes[1], "queries would be the first of longer keys' positions"
        else:
            assert attn_mask_type == "padding_causal_bottom_right"
        if any(x.dtype not in (torch.bfloat16, torch.float16) for x in tensors):
            raise ValueError(f"no fused kernel takes packed {[x.dtype for x in tensors]}")
        widths = key_layer.shape[-1], value_layer.shape[-1]
        if widths[0] != widths[1] or widths != (self.key_width, self.value_width):
            raise ValueError(
                f"keys and values of widths {widths}, made for {self.key_width, self.value_width}"
            )
        outputs = []
        parts = (x.split(counts) for x, counts in zip(tensors, sizes, strict=True))
        for segment in zip(*parts, strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in segment)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)
