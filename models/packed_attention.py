"""Causal attention and rotary embedding over packed sequences, without Transformer Engine.

Megatron's own unfused attention knows no packed sequences, and its unfused rotary embedding for them loops over
segments in Python. Here both work on all segments at once: segments are padded into a few buckets of equal length,
each bucket is one scaled-dot-product call (causal, so that padding at the end of a segment is never seen), and the
positions are a gathered table. Does not build batches (mrl/training/packing.py). Latent attention turns its queries and
keys itself (latent_attention.py) and uses the rest.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from models.rotary import RotaryTable, rotate


@dataclasses.dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters with what this attention needs, computed once per microbatch.

    Bucket i holds `shapes[i] = (segments, padded length)`; slots of all buckets follow one another.
    """

    slot_tokens: Any = None
    """[M] int64: the token in each slot; padding slots repeat token 0."""
    token_slots: Any = None
    """[N] int64: the slot of each token."""
    shapes: tuple[tuple[int, int], ...] = ()
    cos: Any = None
    """[N, 1, D / 2] in the compute dtype."""
    sin: Any = None


def bucket_length(length: np.ndarray) -> np.ndarray:
    """Padded length: the next multiple of 4 up to 32, then of an eighth to a quarter of the length.

    >>> bucket_length(np.array([3, 4, 13, 33, 100])).tolist()
    [4, 4, 16, 40, 112]
    """
    step = np.where(
        length <= 32, 4, 2 ** np.maximum(2, np.floor(np.log2(np.maximum(length, 1))).astype(np.int64) - 2)
    )
    return -(-length // step) * step


def plan_buckets(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, int], ...]]:
    """(slot_tokens [M], token_slots [N], shapes) for segments of the given lengths; see PackedSegments."""
    padded = bucket_length(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    slot_tokens, shapes, base = [], [], 0
    token_slots = np.zeros(int(starts[-1]), np.int64)
    for size in np.unique(padded):
        members = np.flatnonzero(padded == size)
        columns = np.arange(size)
        tokens = starts[members][:, None] + columns[None, :]
        valid = columns[None, :] < lengths[members][:, None]
        slots = base + np.arange(len(members) * size).reshape(len(members), size)
        token_slots[tokens[valid]] = slots[valid]
        slot_tokens.append(np.where(valid, tokens, 0).ravel())
        shapes.append((len(members), int(size)))
        base += len(members) * int(size)
    return np.concatenate(slot_tokens), token_slots, tuple(shapes)


def pack_segments(lengths: np.ndarray, *, rotary: RotaryTable, device: torch.device) -> PackedSegments:
    """Parameters for segments of the given lengths [B], which follow one another."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    slot_tokens, token_slots, shapes = plan_buckets(lengths)
    cu_seqlens = torch.from_numpy(bounds).to(device)
    cos, sin = rotary.at(torch.from_numpy(positions).to(device))
    longest = int(lengths.max())
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        slot_tokens=torch.from_numpy(slot_tokens).to(device),
        token_slots=torch.from_numpy(token_slots).to(device),
        shapes=shapes,
        cos=cos,
        sin=sin,
    )


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


class PackedAttention(torch.nn.Module):
    """Core attention for Megatron's self attention: rotary embedding, then causal attention inside each segment.

    Latent attention's queries and keys arrive turned, and its values are narrower. They are padded to the keys' width,
    because torch's fused kernels want one width; the other ones hold all pairs of positions at once.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
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
        heads, width = query.shape[1], value.shape[2]
        padding = max(0, query.shape[2] - width)
        if self.rotates:
            query, key = (rotate(x, packed.cos, packed.sin) for x in (query, key))
        parts = [_Gather.apply(x, packed.slot_tokens, packed.token_slots) for x in (query, key, value)]
        sizes = [rows * length for rows, length in packed.shapes]
        outputs = []
        for shape, q, k, v in zip(packed.shapes, *(part.split(sizes) for part in parts), strict=True):
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
            v = functional.pad(v, (0, padding)) if padding else v
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
            )
            outputs.append(out[..., :width].transpose(1, 2).reshape(-1, heads * width))
        slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _Scatter.apply(slots, packed.token_slots)
