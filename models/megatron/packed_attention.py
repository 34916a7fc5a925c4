"""Causal attention and rotary embedding over packed sequences, with Transformer Engine and without.

Megatron's own unfused attention knows no packed sequences, and its unfused rotary embedding for them loops
over segments in Python. Here both work on all segments at once: segments are padded into a few buckets of
equal length (packed_segments.py) and each bucket is one scaled-dot-product call (causal, so that padding at
the end of a segment is never seen). Latent attention turns its queries and keys itself (latent_attention.py)
and uses the rest. Transformer Engine's kernels see the same angles; only the core differs.

With context parallelism a rank holds chunks of every segment (zigzag.py). Keys and values of all its ranks
are gathered; backward the gradients of each rank's are summed. The rank's queries then attend to whole
segments, under a mask.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mrl.models.megatron.packed_segments import Buckets, PackedSegments
from mrl.models.megatron.rotary import rotate

_MEGATRONS_FIELDS = [part.name for part in dataclasses.fields(PackedSeqParams)]


class _Gather(torch.autograd.Function):
    """rows[index], whose gradient is grad[inverse]: each row is used once, other uses carry zero gradient.

    index_select's own backward adds rows one by one; a second gather is several times faster on CPU.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _Scatter(torch.autograd.Function):
    """slots[token_slots] -> tokens; the gradient of padding slots is zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, token_slots: Tensor) -> Tensor:
        ctx.save_for_backward(token_slots)
        ctx.num_slots = slots.shape[0]
        return slots.index_select(0, token_slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (token_slots,) = ctx.saved_tensors
        grad = grads[0]
        padded = grad.new_zeros((ctx.num_slots, *grad.shape[1:]))
        padded[token_slots] = grad
        return padded, None


class PackedCore(torch.nn.Module):
    """Core attention for Megatron's self attention: rotary embedding, then causal attention inside each
    segment.

    Latent attention's queries and keys arrive turned, and its values are narrower.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
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
        """query [N, H, D], key [N, G, D], value [N, G, V] -> [N, H x V]. A mask is never given: segments say
        it all."""
        if self.rotates:
            query, key = (rotate(x, packed_seq_params.cos, packed_seq_params.sin) for x in (query, key))
        return self.attend(query, key, value, packed_seq_params, **kwargs)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, **kwargs: Any
    ) -> Tensor:
        """The attention of turned queries and keys."""
        raise NotImplementedError


class PackedAttention(PackedCore):
    """Attention on any device, in torch's own kernels, of which the fused ones want one width.

    Values that are narrower than keys are padded to their width: the other kernels hold all pairs of
    positions at once.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, **kwargs: Any
    ) -> Tensor:
        heads, width = query.shape[1], value.shape[2]
        padding = max(0, query.shape[2] - width)
        if packed.keys is not packed.queries:
            key, value = _gather_ranks(key, value)
        parts = (_fill(packed.queries, query), _fill(packed.keys, key), _fill(packed.keys, value))
        outputs = []
        for q, k, v, mask in zip(*parts, packed.masks, strict=True):
            v = functional.pad(v, (0, padding)) if padding else v
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
            outputs.append(out[..., :width].transpose(1, 2).reshape(-1, heads * width))
        slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _Scatter.apply(slots, packed.queries.token_slots)


class FusedPackedAttention(PackedCore):
    """Transformer Engine's THD kernels, which take values of another width; not run on a GPU yet.

    With context parallelism the kernels pass keys and values round the ranks themselves; they take this
    rank's chunks of every segment (zigzag.py) and the bounds of whole segments. Megatron passes what
    TEDotProductAttention.__init__ takes.
    """

    def __init__(self, config: Any, **kwargs: Any) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__(config)
        self.core = TEDotProductAttention(config, **kwargs)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, **kwargs: Any
    ) -> Tensor:
        segments = PackedSeqParams(**{name: getattr(packed, name) for name in _MEGATRONS_FIELDS})
        return self.core(query, key, value, None, packed_seq_params=segments, **kwargs)


def core_attention(device: torch.device) -> type[PackedCore]:
    """The attention of this device: Transformer Engine's on CUDA where it is installed, our own elsewhere."""
    fused = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    return FusedPackedAttention if fused else PackedAttention


def _fill(buckets: Buckets, tokens: Tensor) -> list[Tensor]:
    """[N, H, D] -> one [segments, H, padded length, D] per bucket."""
    slots = _Gather.apply(tokens, buckets.slot_tokens, buckets.token_slots)
    parts = slots.split([rows * length for rows, length in buckets.shapes])
    return [p.unflatten(0, shape).transpose(1, 2) for p, shape in zip(parts, buckets.shapes, strict=True)]


def _gather_ranks(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, ...] of all context-parallel ranks, rank after rank; gradients of the ranks are
    summed."""
    both: Any = torch.cat((key, value), dim=-1)
    gathered = gather_from_sequence_parallel_region(both, group=parallel_state.get_context_parallel_group())
    return gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
