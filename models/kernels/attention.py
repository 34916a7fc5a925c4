"""Compute causal attention inside each of many packed segments, in torch alone.

Segments are padded into a few buckets of equal length (buckets.py). Each bucket is one scaled-dot-product
call; it is causal, so padding at the end of a segment is never seen. With a window it is two calls, in which
each block of queries sees its own keys and those of the previous block, so no tensor has the size of all
pairs of positions. Segments that continue a prefix also see its keys, which are repeated per segment for the
call only, and need a mask. Megatron's side is models/megatron/packed_attention.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from mrl.models.kernels.buckets import Buckets, SegmentBuckets
from mrl.models.kernels.slots import to_slots, to_tokens

WIDER = 8
"""Dimensions that attention sinks add to queries and keys: the fused kernels need multiples of 8."""


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
    """Return [N, H x V], the attention of query [N, H, D] to key [M, G, D] and value [M, G, V].

    N are the tokens of `buckets.queries`, M those of `buckets.keys` (the same N without context parallelism);
    heads H are a multiple of the groups G. Values narrower than keys are padded, because torch's fused
    kernels need equal widths and the others materialise all pairs of positions.

    Args:
        sinks: [H]; exp of it is added to each head's softmax denominators.
        windowed: A position sees only the last keys, as the buckets define.
    """
    heads, width = query.shape[1], value.shape[2]
    value = padded_to(value, query.shape[2])
    parts = (_fill(buckets.queries, query), *(_fill_keys(buckets, x, windowed) for x in (key, value)))
    outputs = []
    attend = functools.partial(_attend, scale=scale, sinks=sinks)
    masks = buckets.windowed if windowed else buckets.masks
    for q, k, v, mask in zip(*parts, masks, strict=True):
        if windowed and buckets.band is not None and mask is None:
            out = _in_blocks(q, k, v, buckets.band, attend)
        else:
            out = attend(q, k, v, mask)
        outputs.append(out[..., :width].transpose(1, 2).reshape(-1, heads * width))
    slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return to_tokens(slots, buckets.queries.token_slots)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, sinks: Tensor | None
) -> Tensor:
    """Return [S, H, queries, V], under a mask, or causal without one."""
    length = q.shape[2]
    if sinks is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks / scale)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[:, :, -length:]


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, band: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Return [S, H, length, V] of a bucket with a window of W: the first W positions see all before them, and
    each following block of W also sees the keys of the previous block."""
    window, length = band.shape[2], q.shape[2]
    first = attend(*(x[:, :, :window] for x in (q, k, v)), None)
    if length <= window:
        return first
    q, k, v = (functional.pad(x, (0, 0, 0, -length % window)).unflatten(2, (-1, window)) for x in (q, k, v))
    k, v = (torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3) for x in (k, v))
    blocks = (x.transpose(1, 2) for x in (q[:, :, 1:], k, v))
    later_blocks = attend(*(x.flatten(0, 1) for x in blocks), band).unflatten(0, (len(q), -1))
    return torch.cat((first, later_blocks.transpose(1, 2).flatten(2, 3)), dim=2)[:, :, :length]


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Prepend a key whose product with a head's queries is the head's `scores` [H] and whose value is 0.

    Queries get a dimension of ones, in which only that key is not 0. Without a mask a query is also
    prepended, so that plain causal attention lets every other query see the key.
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
    """Pad values [..., V] with zeros up to `width`; wider values are unchanged."""
    missing = width - values.shape[-1]
    return functional.pad(values, (0, missing)) if missing > 0 else values


def _fill_keys(buckets: SegmentBuckets, tokens: Tensor, windowed: bool) -> list[Tensor]:
    """Convert keys or values [M, G, D] to one [segments, G, prefix + padded length, D] per bucket; a windowed
    layer's segments see at most the last positions of their prefix."""
    filled = _fill(buckets.keys, tokens)
    if not any(buckets.prefixes):
        return filled
    # split's backward pass concatenates, and expand's sums: much faster on CPU than adding rows by index
    segments = tokens.split(buckets.lengths)
    for number, prefix in enumerate(buckets.prefixes):
        if prefix:
            before = torch.cat([segments[segment] for segment in prefix]).transpose(0, 1)
            if windowed:
                before = before[:, max(0, before.shape[1] - buckets.window + 1) :]
            keys = filled[number]
            filled[number] = torch.cat((before.expand(len(keys), -1, -1, -1), keys), dim=2)
    return filled


def _fill(buckets: Buckets, tokens: Tensor) -> list[Tensor]:
    """Convert [N, H, D] to one [segments, H, padded length, D] per bucket."""
    slots = to_slots(tokens, buckets.slot_tokens, buckets.token_slots)
    parts = slots.split([rows * length for rows, length in buckets.shapes])
    return [p.unflatten(0, shape).transpose(1, 2) for p, shape in zip(parts, buckets.shapes, strict=True)]
