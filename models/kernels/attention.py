"""Causal attention inside each of many packed segments, in torch alone.

Segments are padded into a few buckets of equal length (buckets.py), and each bucket is one
scaled-dot-product call: causal, so that padding at the end of a segment is never seen. With a window it is two, in
which each block of queries meets its own keys and those of the block before: nothing is as large as all pairs of
positions. Megatron's side is models/megatron/packed_attention.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from mrl.models.kernels.buckets import Buckets, SegmentBuckets
from mrl.models.kernels.slots import to_slots, to_tokens

WIDER = 8
"""Dimensions by which attention sinks widen queries and keys: the fused kernels want multiples of 8."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buckets: SegmentBuckets,
    *,
    scale: float,
    sinks: Tensor | None = None,
    windowed: bool = False,
) -> Tensor:
    """query [N, H, D], key [M, G, D], value [M, G, V] -> [N, H x V]; heads H are a multiple of the groups G.

    N are the tokens of `buckets.queries`, M those of `buckets.keys` (the same N tokens without context
    parallelism). Values narrower than keys are padded to their width: of torch's kernels the fused ones want
    one width, and the others hold all pairs of positions at once. Each head's exp(`sinks` [H]) is added to the
    denominators of its softmax. With `windowed` a position sees the last keys only, as the buckets say.
    """
    heads, width = query.shape[1], value.shape[2]
    value = padded_to(value, query.shape[2])
    parts = (_fill(buckets.queries, query), _fill(buckets.keys, key), _fill(buckets.keys, value))
    outputs = []
    attend = functools.partial(_attend, scale=scale, sinks=sinks)
    masks: Any = buckets.windowed if windowed and buckets.band is None else buckets.masks
    for q, k, v, mask in zip(*parts, masks, strict=True):
        if windowed and buckets.band is not None:
            out = _in_blocks(q, k, v, buckets.band, attend)
        else:
            out = attend(q, k, v, mask)
        outputs.append(out[..., :width].transpose(1, 2).reshape(-1, heads * width))
    slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return to_tokens(slots, buckets.queries.token_slots)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, sinks: Tensor | None
) -> Tensor:
    """[S, H, queries, V] under a mask, or causal without one."""
    length = q.shape[2]
    if sinks is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks / scale)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[:, :, -length:]


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, band: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """[S, H, length, V] of a bucket in which a position sees itself and W - 1 before it: of the first W positions, which see
    all before them, and of the blocks of W that follow, each with the keys of the block before."""
    window, length = band.shape[2], q.shape[2]
    first = attend(*(x[:, :, :window] for x in (q, k, v)), None)
    if length <= window:
        return first
    q, k, v = (functional.pad(x, (0, 0, 0, -length % window)).unflatten(2, (-1, window)) for x in (q, k, v))
    k, v = (torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3) for x in (k, v))
    blocks = (x.transpose(1, 2) for x in (q[:, :, 1:], k, v))
    rest = attend(*(x.flatten(0, 1) for x in blocks), band).unflatten(0, (len(q), -1))
    return torch.cat((first, rest.transpose(1, 2).flatten(2, 3)), dim=2)[:, :, :length]


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and mask of a bucket with one more key in front, whose product with every query of a
    head is the head's `scores` [H] and whose value is 0.

    Queries have a further dimension of ones, in which that key alone is not 0. Without a mask a query stands in
    front too, so that plain causal attention still lets every other one see the key.
    """
    heads, width = q.shape[1], q.shape[3]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    ones, zeros = q.new_ones(*q.shape[:3], 1), q.new_zeros(*q.shape[:3], WIDER - 1)
    q = torch.cat((q, ones, zeros), dim=-1)
    sink = functional.pad(scores[:, None].to(k.dtype), (width, WIDER - 1))
    k = torch.cat((sink[None, :, None].expand(len(k), -1, -1, -1), functional.pad(k, (0, WIDER))), dim=2)
    v = functional.pad(v, (0, WIDER, 1, 0))
    if mask is None:
        return functional.pad(q, (0, 0, 1, 0)), k, v, None
    return q, k, v, functional.pad(mask, (1, 0))


def padded_to(values: Tensor, width: int) -> Tensor:
    """Values [..., V] with zeros behind them up to `width`; as they are where they are as wide or wider."""
    missing = width - values.shape[-1]
    return functional.pad(values, (0, missing)) if missing > 0 else values


def _fill(buckets: Buckets, tokens: Tensor) -> list[Tensor]:
    """[N, H, D] -> one [segments, H, padded length, D] per bucket."""
    slots = to_slots(tokens, buckets.slot_tokens, buckets.token_slots)
    parts = slots.split([rows * length for rows, length in buckets.shapes])
    return [p.unflatten(0, shape).transpose(1, 2) for p, shape in zip(parts, buckets.shapes, strict=True)]
