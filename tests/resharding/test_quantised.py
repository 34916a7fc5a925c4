"""Block quantisation: the rule, whose blocks they are, and what cannot be planned."""

import itertools
import random

import pytest
import torch

from benchmarks.resharding.models import TINY
from mrl.errors import WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.models.tensors import SCALES
from mrl.resharding.planner import engine_manifests, quantised, trainer_manifests
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.quantised import VALUES, Blocks, cut_inside_blocks, without_cut_modules
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer import fp8
from tests.resharding.worlds import FAMILIES, random_config

WIDE = TINY | {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 256, "vocab_size": 128}


def by_hand(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise block by block, as the text defines it."""
    rows, cols = weight.shape
    values = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block), -(-cols // block))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            here = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            tile = weight[here].float()
            powers = (2.0**power for power in itertools.count(-22))
            scales[i, j] = next(scale for scale in powers if tile.abs().max() <= 464 * scale)
            values[here] = (tile / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 40), (1, 300), (576, 129), (700, 900)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_every_block_is_scaled_for_its_own_largest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4).to(dtype)
    weight[: shape[0] // 2, : shape[1] // 3] = 0
    values, scales = by_hand(weight, 128)
    assert torch.equal(fp8.block_scales(weight, 128), scales)
    assert torch.equal(fp8.values(weight, scales, 128).view(torch.uint8), values.view(torch.uint8))
    strided = torch.empty(shape[0], shape[1] + 7, dtype=dtype)[:, 3 : 3 + shape[1]].copy_(weight)
    assert torch.equal(fp8.quantised(strided, "float32", 128), scales)


def test_the_error_is_that_of_three_bits() -> None:
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    (_, values), (_, scales) = fp8.whole_tensors([("a.q_proj.weight", weight)], 128)
    back = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    normal = weight.abs().float() > back.abs().max() / 448 * 2**-6
    assert ((back - weight.float()).abs() / weight.abs().float())[normal].max() <= 2**-4 * 1.001
    assert 240 <= values.float().abs().max() <= 448


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (464.0, 1.0),
        (464.1, 2.0),
        (232.0, 0.5),
        (232.1, 1.0),
        (448.0, 1.0),
        (1e-4, 2.0**-22),
        (3e38, 2.0**119),
    ],
)
def test_a_scale_is_the_smallest_power_of_two_for_the_largest(largest: float, scale: float) -> None:
    weight = torch.tensor([[largest, -largest / 3]])
    scales = fp8.block_scales(weight, 128)
    assert scales.item() == scale
    assert abs(fp8.values(weight, scales, 128)[0, 0].float() * scale / largest - 1) < 0.04


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible(odd: float) -> None:
    weight = torch.ones(256, 128, dtype=torch.bfloat16)
    weight[3, 5] = odd
    values, scales = (fp8.quantised(weight, wire, 128) for wire in (VALUES, "float32"))
    back = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert not back[3, 5].isfinite() and (back[128:] == 1).all()


@pytest.mark.parametrize("smallest", [1e-45, 1e-43, 1e-38, 0.0])
def test_a_block_too_small_for_a_scale_has_the_smallest(smallest: float) -> None:
    weight = torch.full((4, 4), smallest)
    values, scales = (fp8.quantised(weight, wire, 4) for wire in (VALUES, "float32"))
    assert values.float().isfinite().all() and scales.item() == 2.0**-22


# float8 is refused for the excluded ones
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_moe"}))
def test_linear_layers_are_quantised_and_nothing_else(family: str) -> None:
    hf = random_config(random.Random(0), family)
    kept = ("norm", "embed_tokens", "lm_head", ".gate.", "_gate.", "bias")
    for tensor in family_of(hf).checkpoint_tensors(hf):
        assert quantised.quantises(tensor.name) != any(word in tensor.name for word in kept), tensor.name


def test_whole_blocks_of_a_box() -> None:
    blocks = Blocks((300, 256), 128)
    assert blocks.grid == (3, 2)
    assert blocks.inside((0, 0), (300, 256)) == ((0, 0), (3, 2))
    assert blocks.inside((100, 0), (200, 256)) == ((1, 0), (2, 2))
    assert blocks.inside((130, 0), (100, 256))[1] == (0, 2)
    assert blocks.elements((2, 1), (1, 1)) == ((256, 128), (44, 128))


def test_half_the_bytes_cross_and_the_bound_is_met() -> None:
    held = trainer_manifests.trainer_rank_manifests(WIDE, Layout(tp=2, ep=2))
    wide = engine_manifests.engine_rank_manifests(WIDE, Layout(tp=2))
    narrow = [quantised.quantised_manifest(m) for m in wide]
    plans = [build_plan(held, needed, Topology.shared(2)) for needed in (wide, narrow)]
    whole, half = (plan.summary() for plan in plans)
    assert half["bytes_needed"] == sum(m.num_bytes for m in narrow) < 0.6 * whole["bytes_needed"]
    moved = half["bytes_intra_node"] + half["bytes_inter_node"]
    assert moved == half["lower_bound_cross_slot_bytes"] < 0.6 * whole["lower_bound_cross_slot_bytes"]
    assert half["whole_bytes"] == 0 and plans[0].digest != plans[1].digest
    other = build_plan(held, narrow, Topology.shared(2), PlanOptions(quantise_block=64))
    assert other.digest != plans[1].digest


def test_an_engine_that_cuts_inside_a_block_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"must begin on a block of 128"):
        quantised.quantised_manifest(
            engine_manifests.engine_rank_manifests(WIDE | {"moe_intermediate_size": 128}, Layout(tp=2))[1]
        )


def test_what_the_trainer_cuts_inside_a_block_comes_whole_with_its_module() -> None:
    """Expert tensor parallelism splits 256 columns and rows in four: experts come whole, attention not."""
    held = trainer_manifests.trainer_rank_manifests(WIDE, Layout(tp=2, dp=2, etp=4))
    needed = [
        quantised.quantised_manifest(m)
        for m in engine_manifests.engine_rank_manifests(WIDE, Layout(tp=2, dp=2))
    ]
    experts = {n for t in needed[0].tensors for p in t.pieces if ".experts." in (n := p.tensor)}
    assert cut_inside_blocks(held, 128) == {n for n in experts if not n.endswith(SCALES)}
    plan = build_plan(held, needed, Topology.shared(4))
    assert plan.whole_tensors.keys() == {n for n in experts if not n.endswith(SCALES)}
    assert plan.summary()["whole_bytes"] == 4 * 2 * 4 * 8 * 3 * 256 * 256
    kept = without_cut_modules(held, needed, 128)[0].tensors
    assert any(t.dtype == VALUES for t in kept) and not any(".experts." in t.name for t in kept)
    wide = engine_manifests.engine_rank_manifests(WIDE, Layout(tp=2, dp=2))
    assert not build_plan(held, wide, Topology.shared(4)).whole_tensors
