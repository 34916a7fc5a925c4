"""Causal attention and rotary embedding over packed sequences, without Transformer Engine.

Megatron's own unfused attention knows no packed sequences, and its unfused rotary embedding for them loops over
segments in Python. Here both work on all segments at once: segments are padded into a few buckets of equal length,
each bucket is one scaled-dot-product call (causal, so that padding at the end of a segment is never seen), and the
positions are a gathered table. Does not build batches (mrl/training/packing.py). Latent attention turns its queries and
keys itself (latent_attention.py) and uses the rest.

With context parallelism a rank holds chunks of every segment (zigzag.py). Keys and values of all its ranks are gathered;
backward the gradients of each rank's are summed. The rank's queries then attend to whole segments, under a mask.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from models.rotary import RotaryTable, rotate
from models.zigzag import kept


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """Where tokens stand in padded buckets. Bucket i holds `shapes[i] = (segments, padded length)`; slots of all buckets
    follow one another."""

    slot_tokens: Tensor
    """[M] int64: the token in each slot; padding slots repeat token 0."""
    token_slots: Tensor
    """[N] int64: the slot of each token."""
    shapes: tuple[tuple[int, int], ...]

    def fill(self, tokens: Tensor) -> list[Tensor]:
        """[N, H, D] -> one [segments, H, padded length, D] per bucket."""
        slots = _Gather.apply(tokens, self.slot_tokens, self.token_slots)
        parts = slots.split([rows * length for rows, length in self.shapes])
        return [p.unflatten(0, shape).transpose(1, 2) for p, shape in zip(parts, self.shapes, strict=True)]


@dataclasses.dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters with what this attention needs, computed once per microbatch.

    N counts the tokens of this rank; megatron's own fields describe whole segments.
    """

    cos: Any = None
    """[N, 1, D / 2] in the compute dtype."""
    sin: Any = None
    queries: Any = None
    """Buckets of this rank's tokens."""
    keys: Any = None
    """Buckets of the tokens of all context-parallel ranks, rank after rank; the queries' where there is one rank."""
    masks: Any = None
    """Per bucket what is added to the scores [segments, 1, queries, keys]: 0, or -inf for later keys and padding. None
    where queries and keys are the same and plain causal attention will do."""


def bucket_length(length: np.ndarray) -> np.ndarray:
    """Padded length: the next multiple of 4 up to 32, then of an eighth to a quarter of the length.

    >>> bucket_length(np.array([3, 4, 13, 33, 100])).tolist()
    [4, 4, 16, 40, 112]
    """
    step = np.where(
        length <= 32, 4, 2 ** np.maximum(2, np.floor(np.log2(np.maximum(length, 1))).astype(np.int64) - 2)
    )
    return -(-length // step) * step


def plan_buckets(
    lengths: np.ndarray, *, unit: int = 1
) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, int], ...]]:
    """(slot_tokens [M], token_slots [N], shapes) for segments of the given lengths; see Buckets.

    Lengths are multiples of `unit`; buckets are those of lengths / unit, so that queries and keys fall into the same.
    """
    padded = unit * bucket_length(lengths // unit)
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


def pack_segments(
    lengths: np.ndarray, *, rotary: RotaryTable, device: torch.device, cp: int = 1, rank: int = 0
) -> PackedSegments:
    """Parameters for segments of the given lengths [B], which follow one another; `rank` of `cp` has its chunks of them."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = (np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths))[kept(lengths, cp=cp, rank=rank)]
    cu_seqlens = torch.from_numpy(bounds).to(device)
    cos, sin = rotary.at(torch.from_numpy(positions).to(device))
    longest = int(lengths.max())
    packed = PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=cos,
        sin=sin,
    )
    if cp == 1:
        packed.queries = packed.keys = _on_device(*plan_buckets(lengths), device=device)
        packed.masks = [None] * len(packed.keys.shapes)
        return packed
    packed.queries = _on_device(*plan_buckets(lengths // cp, unit=2), device=device)
    packed.keys = _gathered_keys(lengths, cp=cp, device=device)
    packed.masks = _masks(
        packed.queries, packed.keys, torch.from_numpy(positions).to(device), dtype=cos.dtype
    )
    return packed


def _on_device(
    slot_tokens: np.ndarray,
    token_slots: np.ndarray,
    shapes: tuple[tuple[int, int], ...],
    *,
    device: torch.device,
) -> Buckets:
    return Buckets(
        torch.from_numpy(slot_tokens).to(device), torch.from_numpy(token_slots).to(device), shapes
    )


def _gathered_keys(lengths: np.ndarray, *, cp: int, device: torch.device) -> Buckets:
    """Buckets of whole segments, whose tokens lie as they are gathered: rank after rank."""
    slot_tokens, token_slots, shapes = plan_buckets(lengths, unit=2 * cp)
    gathered = np.concatenate([kept(lengths, cp=cp, rank=rank) for rank in range(cp)])
    return _on_device(np.argsort(gathered)[slot_tokens], token_slots[gathered], shapes, device=device)


def _masks(queries: Buckets, keys: Buckets, positions: Tensor, *, dtype: torch.dtype) -> list[Tensor]:
    """Slot j of a bucket's row is position j of its segment; a query at `positions` [N] sees it from there on.

    Padding of the queries has some token's position, so that it sees at least slot 0 and gives finite values.
    """
    own = positions[queries.slot_tokens].split([rows * length for rows, length in queries.shapes])
    masks = []
    for shape, (_, key_length), at in zip(queries.shapes, keys.shapes, own, strict=True):
        later = torch.arange(key_length, device=at.device) > at.view(*shape, 1)
        masks.append(
            torch.zeros(later.shape, dtype=dtype, device=at.device).masked_fill_(later, -math.inf)[:, None]
        )
    return masks


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
        if packed.keys is not packed.queries:
            key, value = _gather_ranks(key, value)
        parts = (packed.queries.fill(query), packed.keys.fill(key), packed.keys.fill(value), packed.masks)
        outputs = []
        for q, k, v, mask in zip(*parts, strict=True):
            v = functional.pad(v, (0, padding)) if padding else v
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
            outputs.append(out[..., :width].transpose(1, 2).reshape(-1, heads * width))
        slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _Scatter.apply(slots, packed.queries.token_slots)


def _gather_ranks(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, ...] of all context-parallel ranks, rank after rank; gradients of the ranks are summed."""
    both: Any = torch.cat((key, value), dim=-1)
    gathered = gather_from_sequence_parallel_region(both, group=parallel_state.get_context_parallel_group())
    return gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
