"""Which attention a device gets; on a GPU, that Transformer Engine's agrees with our own."""

import dataclasses

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mrl.models.kernels.rotary import RotaryTable
from mrl.models.megatron.packed_attention import FusedPackedAttention, PackedAttention, core_attention
from mrl.models.megatron.packed_segments import PackedSegments, pack_segments
from mrl.models.rope import Rope


def test_cpu_gets_our_own_attention() -> None:
    assert core_attention(torch.device("cpu")) is PackedAttention


def test_segments_carry_all_that_megatron_hands_to_the_fused_kernels() -> None:
    names = {field.name for field in dataclasses.fields(PackedSeqParams)}
    assert {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"} <= names
    assert names < {field.name for field in dataclasses.fields(PackedSegments)}


@pytest.mark.gpu
@pytest.mark.parametrize("latent", [False, True])
def test_the_fused_attention_agrees_with_our_own(latent: bool) -> None:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    device, rng = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    assert core_attention(device) is FusedPackedAttention, "Transformer Engine is not installed"
    heads, width = 8, 64
    groups, value_width = (heads, 48) if latent else (2, width)
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=1,
        hidden_size=512,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=64,
        bf16=True,
    )
    rotary = RotaryTable(Rope(1e4, width), max_length=512, dtype=torch.bfloat16, device=device)
    packed = pack_segments(np.array([300, 17, 130, 1]), rotary=rotary, device=device)
    query, key, value = (
        torch.randn(448, count, size, device=device, dtype=torch.bfloat16, generator=rng)
        for count, size in ((heads, width), (groups, width), (groups, value_width))
    )
    widths = {"softmax_scale": 0.1, "k_channels": width, "v_channels": value_width} if latent else {}
    fused = FusedPackedAttention(
        config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self", **widths
    )
    options = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": packed}
    found = fused(query, key, value, None, **options)
    torch.testing.assert_close(
        found, PackedAttention(config, **widths)(query, key, value, None, **options), rtol=2e-2, atol=2e-2
    )
