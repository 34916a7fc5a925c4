"""What is built for a microbatch is on its device, and no larger than its tokens: shown on "meta", where no data is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrl.models.kernels.attention import packed_attention
from mrl.models.kernels.buckets import SegmentBuckets
from mrl.models.kernels.experts import grouped_swiglu
from mrl.models.kernels.rotary import RotaryTable, rotate
from mrl.models.kernels.zigzag import padded
from mrl.models.megatron.packed_segments import PackedSegments, pack_segments
from mrl.models.rope import Rope
from tests.support.tensors import tensors

META = torch.device("meta")
WIDTH = 64
LENGTHS = padded(np.array([65536, 17, 4096]), 4)


def pack(*, cp: int, bucketed: bool) -> PackedSegments:
    rotary = RotaryTable(Rope(1e4, WIDTH), max_length=70000, dtype=torch.bfloat16, device=META)
    packed = pack_segments(LENGTHS, rotary=rotary, device=META, cp=cp, bucketed=bucketed)
    packed.angles = None  # a table of all positions, made once
    return packed


@pytest.mark.parametrize("bucketed", [True, False])
@pytest.mark.parametrize("cp", [1, 4])
def test_a_microbatchs_segments_are_on_its_device(cp: int, bucketed: bool) -> None:
    """With context parallelism our own attention needs masks over all pairs: short segments here."""
    if cp > 1 and bucketed:
        rotary = RotaryTable(Rope(1e4, WIDTH), max_length=128, dtype=torch.bfloat16, device=META)
        packed = pack_segments(padded(np.array([100, 7]), cp), rotary=rotary, device=META, cp=cp)
    else:
        packed = pack(cp=cp, bucketed=bucketed)
    found = list(tensors(packed))
    assert len(found) >= 4 and all(x.device == META for x in found)


@pytest.mark.parametrize(("cp", "bucketed"), [(1, True), (1, False), (4, False)])
def test_a_microbatchs_segments_are_no_larger_than_its_tokens(cp: int, bucketed: bool) -> None:
    """Transformer Engine's attention is told bounds alone, whatever the context parallelism."""
    tokens = int(LENGTHS.sum()) // cp
    for x in tensors(pack(cp=cp, bucketed=bucketed)):
        assert x.numel() <= 2 * tokens * WIDTH, tuple(x.shape)


def test_our_layers_arithmetic_stays_on_its_device() -> None:
    packed = pack(cp=1, bucketed=True)
    tokens = int(LENGTHS.sum())
    query, key, value = (
        torch.empty(tokens, heads, WIDTH, dtype=torch.bfloat16, device=META) for heads in (8, 2, 2)
    )
    assert isinstance(packed.buckets, SegmentBuckets)
    turned = rotate(query, packed.cos, packed.sin)
    found = packed_attention(turned, key, value, packed.buckets, scale=0.1)
    assert found.device == META and found.shape == (tokens, 8 * WIDTH)
    first, second = (
        torch.empty(*shape, dtype=torch.bfloat16, device=META) for shape in ((4, 32, WIDTH), (4, WIDTH, 16))
    )
    counts, probs = torch.empty(4, dtype=torch.int64, device=META), torch.empty(tokens, device=META)
    hidden = torch.empty(tokens, WIDTH, dtype=torch.bfloat16, device=META)
    assert grouped_swiglu(hidden, first, second, counts, probs).device == META
