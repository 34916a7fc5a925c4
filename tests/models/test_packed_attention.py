"""The packed attention against one attention call per segment, values and gradients."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from mrl.models.kernels.attention import packed_attention
from mrl.models.kernels.buckets import bucket_length, plan_buckets, segment_buckets
from mrl.models.kernels.rotary import RotaryTable
from mrl.models.kernels.segment_tree import SegmentTree
from mrl.models.kernels.zigzag import rank_positions
from mrl.models.megatron.packed_attention import PackedAttention
from mrl.models.megatron.packed_segments import pack_segments
from mrl.models.rope import Rope

CONFIG = types.SimpleNamespace(
    kv_channels=8,
    multi_latent_attention=False,
    softmax_type="vanilla",
    window_size=None,
    window_attn_skip_freq=None,
    no_rope_freq=None,
)


def by_segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """Attend with rotary embedding and softmax written out, segment by segment, head by head."""
    outputs, start = [], 0
    half = q.shape[2] // 2
    inverse = 1.0 / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    for length in lengths.tolist():
        rows = slice(start, start + length)
        angle = (torch.arange(length, dtype=torch.float64)[:, None] * inverse).repeat(1, 2)

        def turn(x: torch.Tensor, angle: torch.Tensor = angle) -> torch.Tensor:
            swapped = torch.cat((-x[:, half:], x[:, :half]), -1)
            return x * angle.cos() + swapped * angle.sin()

        heads = []
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = turn(q[rows, head]) @ turn(k[rows, group]).t() / q.shape[2] ** 0.5
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            heads.append(scores.softmax(-1) @ v[rows, group])
        outputs.append(torch.cat(heads, -1))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [3, 17, 1, 40, 8, 3, 64, 16]], ids=str)
def test_values_and_gradients(lengths: list[int]) -> None:
    sizes = np.asarray(lengths, np.int64)
    total = int(sizes.sum())
    torch.manual_seed(0)
    q = torch.randn(total, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(total, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    rotary = RotaryTable(Rope(10000.0, 8), max_length=64, dtype=torch.float64, device=torch.device("cpu"))
    packed = pack_segments(SegmentTree.of_roots(sizes), rotary=rotary, device=torch.device("cpu"))
    output = PackedAttention(CONFIG, layer_number=1)(q, k, v, None, packed_seq_params=packed)
    expected = by_segment(q, k, v, sizes)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # the table's angles are float32
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((output * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [5, 12])
def test_turned_queries_and_values_of_another_width(width: int) -> None:
    """Compare with each segment alone, for inputs as latent attention has them."""
    config = types.SimpleNamespace(**vars(CONFIG) | {"multi_latent_attention": True})
    lengths, cpu = np.array([7, 1, 30]), torch.device("cpu")
    rotary = RotaryTable(Rope(10000.0, 8), max_length=64, dtype=torch.float64, device=cpu)
    packed = pack_segments(SegmentTree.of_roots(lengths), rotary=rotary, device=cpu)
    q, k = (torch.randn(38, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.randn(38, 4, width, dtype=torch.float64, requires_grad=True)
    out = PackedAttention(config, layer_number=1, softmax_scale=0.3)(q, k, v, None, packed_seq_params=packed)
    outputs = []
    for rows in torch.arange(38).split(lengths.tolist()):
        scores = 0.3 * torch.einsum("ihd,jhd->hij", q[rows], k[rows])
        scores = scores.masked_fill(torch.ones(len(rows), len(rows)).triu(1).bool(), float("-inf"))
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[rows]).flatten(1))
    expected = torch.cat(outputs)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [0, 1, 4, 6, 31, 40])
@pytest.mark.parametrize("cp", [1, 2])
def test_sinks_and_windows(cp: int, window: int) -> None:
    """Compare with each segment alone, whose softmax has one more score per row; with two ranks, rank 1's."""
    lengths, cpu, scale = np.array([8, 4, 32]), torch.device("cpu"), 0.3
    q = torch.randn(44, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(44, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    outputs = []
    for rows in torch.arange(44).split(lengths.tolist()):
        keys, values = (x[rows].repeat_interleave(2, dim=1) for x in (k, v))
        scores = scale * torch.einsum("ihd,jhd->hij", q[rows], keys)
        seen = torch.ones(len(rows), len(rows)).tril().bool()
        if window:
            seen &= torch.ones(len(rows), len(rows)).triu(1 - window).bool()
        scores = scores.masked_fill(~seen, float("-inf"))
        shares = torch.cat((scores, sinks.view(4, 1, 1).expand(-1, len(rows), 1)), -1).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", shares[..., :-1], values).flatten(1))
    ranks = [rank_positions(lengths, cp=cp, rank=rank) for rank in range(cp)]
    local, gathered = ranks[-1], np.concatenate(ranks)
    expected = torch.cat(outputs)[local]
    options = {"cp": cp, "rank": cp - 1, "window": window}
    buckets = segment_buckets(SegmentTree.of_roots(lengths), dtype=torch.float64, device=cpu, **options)
    output = packed_attention(
        q[local], k[gathered], v[gathered], buckets, scale=scale, sinks=sinks, windowed=bool(window)
    )
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((output * weight).sum(), (q, k, v, sinks))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v, sinks))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [0, 1, 4, 31])
def test_segments_that_continue_a_prefix(window: int) -> None:
    """Compare with each sequence alone, prefix and all; two levels, rows of unequal length in a bucket."""
    tree = SegmentTree(np.array([9, 6, 5, 30, 3, 2]), np.array([-1, 0, 0, 0, 3, -1]))
    scale, starts = 0.3, tree.starts()
    q = torch.randn(55, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(55, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    outputs = []
    for segment in range(len(tree.lengths)):
        path = (*tree.prefix(segment), segment)
        rows = torch.cat([torch.arange(starts[part], starts[part + 1]) for part in path])
        keys, values = (x[rows].repeat_interleave(2, dim=1) for x in (k, v))
        scores = scale * torch.einsum("ihd,jhd->hij", q[rows], keys)
        seen = torch.ones(len(rows), len(rows)).tril().bool()
        if window:
            seen &= torch.ones(len(rows), len(rows)).triu(1 - window).bool()
        scores = scores.masked_fill(~seen, float("-inf"))
        shares = torch.cat((scores, sinks.view(4, 1, 1).expand(-1, len(rows), 1)), -1).softmax(-1)
        whole = torch.einsum("hij,jhd->ihd", shares[..., :-1], values).flatten(1)
        outputs.append(whole[-tree.lengths[segment] :])
    expected = torch.cat(outputs)
    buckets = segment_buckets(tree, dtype=torch.float64, device=torch.device("cpu"), window=window)
    assert len(buckets.queries.shapes) < len(tree.lengths)  # segments 1 and 2 are one bucket
    output = packed_attention(q, k, v, buckets, scale=scale, sinks=sinks, windowed=bool(window))
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((output * weight).sum(), (q, k, v, sinks))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v, sinks))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_buckets_hold_every_token_once_and_waste_little() -> None:
    lengths = np.random.default_rng(0).integers(10, 300, 200)
    slot_tokens, token_slots, shapes = plan_buckets(lengths)
    assert len(set(token_slots.tolist())) == lengths.sum()
    np.testing.assert_array_equal(slot_tokens[token_slots], np.arange(lengths.sum()))
    assert sum(rows * size for rows, size in shapes) == len(slot_tokens) <= 1.15 * lengths.sum()
    assert (bucket_length(np.arange(1, 500)) >= np.arange(1, 500)).all()
