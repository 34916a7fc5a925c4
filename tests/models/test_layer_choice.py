"""The layers and attention that a rank gets; on a GPU, Transformer Engine's attention matches ours."""

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn import functional

from mrl.config.sections.training import LayoutSection, TrainingSection
from mrl.errors import ConfigError
from mrl.models.kernels.rotary import RotaryTable
from mrl.models.kernels.segment_tree import SegmentTree
from mrl.models.megatron.layer_choice import LayerChoice, choose_layers
from mrl.models.megatron.packed_attention import FusedPackedAttention, PackedAttention, core_attention
from mrl.models.megatron.packed_segments import PackedSegments, pack_segments
from mrl.models.rope import Rope
from mrl.models.tensors import TRAINER, TRANSFORMER_ENGINE
from tests.support.transformer_engine import FOLDER

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPREAD = LayoutSection(ep=2, dp=2)
bfloat16 = partial(TrainingSection, dtype="bfloat16")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))


def test_auto_takes_transformer_engine_only_on_a_gpu_that_has_it(installed: None) -> None:
    assert choose_layers(bfloat16(), CPU) == LayerChoice(False)
    assert choose_layers(bfloat16(), GPU) == LayerChoice(True)
    assert choose_layers(bfloat16(spec="local"), GPU) == LayerChoice(False)
    assert choose_layers(bfloat16(spec="transformer_engine"), CPU) == LayerChoice(True)


def test_without_transformer_engine_layers_are_local_and_asking_for_it_is_refused() -> None:
    assert choose_layers(bfloat16(), GPU) == LayerChoice(False)
    with pytest.raises(ConfigError, match="transformer_engine, which is not installed"):
        choose_layers(bfloat16(spec="transformer_engine"), GPU)


def test_attention_that_only_ours_computes_has_local_layers_wherever_it_runs(installed: None) -> None:
    assert choose_layers(bfloat16(), GPU, own_attention=True) == LayerChoice(False)
    with pytest.raises(ConfigError, match=r"attention sinks, .*; set local or auto"):
        choose_layers(bfloat16(spec="transformer_engine"), GPU, own_attention=True)


def test_names_follow_the_layers() -> None:
    assert (LayerChoice(True).spec, LayerChoice(False).spec) == (TRANSFORMER_ENGINE, TRAINER)


def test_float32_has_our_own_attention_beside_transformer_engines_layers() -> None:
    assert core_attention(LayerChoice(True)) is FusedPackedAttention
    assert core_attention(LayerChoice(True, dtype=torch.float32)) is PackedAttention
    assert core_attention(LayerChoice(False)) is PackedAttention


def test_fusions_come_with_transformer_engine() -> None:
    fused = LayerChoice(True).fields(bfloat16(), is_moe=True)
    names = ("bias_activation_fusion", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
    assert all(fused[name] for name in names)
    assert not LayerChoice(True).fields(bfloat16(router_dtype="fp64"), is_moe=True)["moe_router_fusion"]
    assert not LayerChoice(True, replays=True).fields(bfloat16(), is_moe=True)["moe_router_fusion"]
    local = LayerChoice(False).fields(bfloat16(), is_moe=True)
    assert not any(local[name] for name in names)


def test_deep_ep_is_taken_where_experts_are_spread(installed: None, deep_ep: None) -> None:
    assert choose_layers(bfloat16(layout=SPREAD), GPU).flex
    fields = choose_layers(bfloat16(layout=SPREAD), GPU).fields(bfloat16(), is_moe=True)
    assert (fields["moe_token_dispatcher_type"], fields["moe_flex_dispatcher_backend"]) == ("flex", "deepep")
    for other in (
        bfloat16(),
        TrainingSection(dtype="float32", layout=SPREAD),
        bfloat16(layout=SPREAD, dispatcher="alltoall"),
        bfloat16(layout=SPREAD, spec="local"),
        bfloat16(layout=SPREAD, router_dtype="fp64"),
    ):
        assert not choose_layers(other, GPU).flex


def test_flex_without_deep_ep_is_refused() -> None:
    assert not choose_layers(bfloat16(layout=SPREAD), GPU).flex
    with pytest.raises(ConfigError, match="DeepEP"):
        choose_layers(bfloat16(layout=SPREAD, dispatcher="flex"), GPU)


def test_segments_carry_all_that_megatron_hands_to_the_fused_kernels() -> None:
    names = {field.name for field in dataclasses.fields(PackedSeqParams)}
    assert {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"} <= names
    assert names < {field.name for field in dataclasses.fields(PackedSegments)}


@pytest.mark.gpu
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("parents", [[-1, -1, -1, -1], [-1, 0, 0, 1]], ids=["whole", "shared prefixes"])
def test_the_fused_attention_agrees_with_our_own(parents: list[int], latent: bool) -> None:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    device, rng = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    assert choose_layers(bfloat16(), device).transformer_engine, "it is not installed"
    heads, width = 8, 192 if latent else 64
    groups, value_width = (heads, 128) if latent else (2, width)
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=1,
        hidden_size=512,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=64,
        bf16=True,
    )
    rotary = RotaryTable(Rope(1e4, width), max_length=512, dtype=torch.bfloat16, device=device)
    tree = SegmentTree(np.array([300, 17, 130, 1]), np.array(parents))
    query, key, value = (
        torch.randn(448, count, size, device=device, dtype=torch.bfloat16, generator=rng).requires_grad_()
        for count, size in ((heads, width), (groups, width), (groups, value_width))
    )
    widths = {"softmax_scale": 0.1, "k_channels": width, "v_channels": value_width} if latent else {}
    fused = FusedPackedAttention(
        config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self", **widths
    )
    results = []
    for attention in (fused, PackedAttention(config, layer_number=1, **widths)):
        packed = pack_segments(tree, rotary=rotary, device=device, bucketed=attention.bucketed)
        options = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": packed}
        padded = functional.pad(value, (0, width - value_width))  # as Megatron's latent attention does
        output = attention(query, key, padded, None, **options)
        output = output.unflatten(-1, (heads, -1))[..., :value_width].flatten(-2)
        results.append((output, *torch.autograd.grad(output.float().square().sum(), (query, key, value))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)
