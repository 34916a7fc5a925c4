"""Adapters by name, without an engine: every stored number has its place on the ranks of any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.sections.lora import LoraSection
from mrl.config.sections.training import LayoutSection, TrainingSection
from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.models.adapters import Adapter, adapter_shapes, adapters, changed_tensors, num_elements
from mrl.models.families import family_of
from mrl.models.kernels.low_rank import merged
from mrl.models.layout import Layout
from mrl.models.tensors import LOCAL, TRAINER, TRANSFORMER_ENGINE, Spec
from mrl.training.hf.peft import target_modules
from tests.tiny_models import COMMON, EXPERTS, GPT_OSS, LATENT

EVERYTHING = LoraSection(rank=3, targets=("attention", "mlp", "shared_experts", "routed_experts"))
DEEPSEEK: dict[str, Any] = {"model_type": "deepseek_v3", "num_hidden_layers": 4} | COMMON | LATENT
PHI: dict[str, Any] = {"model_type": "phi3", "num_hidden_layers": 4} | COMMON
MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_hidden_layers": 4} | COMMON | EXPERTS


def held(hf: dict[str, Any], layout: Layout, lora: LoraSection, spec: Spec) -> list[Adapter]:
    family, places = family_of(hf), layout.all_coordinates()
    return [a for place in places for a in adapters(family, hf, layout, place, lora, spec=spec)]


@pytest.mark.parametrize("spec", [TRAINER, LOCAL, TRANSFORMER_ENGINE], ids=["own", "local", "engine"])
@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2, "ep": 2}, {"tp": 2, "pp": 2, "dp": 2}, {"cp": 2, "ep": 4, "dp": 2}], ids=str
)
def test_ranks_hold_every_stored_number_once(layout: dict[str, int], spec: Spec) -> None:
    """Without replicas; for all layers and layouts the stored tensors are the same."""
    require_every_number_once(DEEPSEEK, Layout(**layout), EVERYTHING, spec)


def test_merged_tensors_have_one_pair_each() -> None:
    """Phi's queries, keys and values, gate and up: one tensor in the folder is one module to PEFT."""
    lora = LoraSection(rank=3, targets=("attention", "mlp"))
    require_every_number_once(PHI, Layout(tp=4, pp=2), lora, TRAINER)
    changed = changed_tensors(family_of(PHI), PHI, lora)
    for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        name = f"model.layers.3.{module}"
        assert changed.pop(f"{name}.weight") == (f"{name}.lora_A.weight", f"{name}.lora_B.weight")
    assert len(changed) == 3 * 4


def require_every_number_once(hf: dict[str, Any], layout: Layout, lora: LoraSection, spec: Spec) -> None:
    """Check that each stored number is on exactly one rank."""
    family, shapes = family_of(hf), adapter_shapes(family_of(hf), hf, lora)
    changed = changed_tensors(family, hf, lora)
    counts = {name: np.zeros(shapes[name], int) for pair in changed.values() for name in pair}
    for adapter in held(hf, layout, lora, spec):
        for half in (adapter.a, adapter.b):
            assert sum(int(np.prod(p.shape)) for p in half.tensor.pieces) == int(np.prod(half.tensor.shape))
            for piece in half.tensor.pieces if half.replica == (0, 0, 0) else ():
                counts[piece.tensor][
                    tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
                ] += 1
    assert all((count == 1).all() for count in counts.values())
    assert sum(count.size for count in counts.values()) == num_elements(family, hf, lora)


def test_a_fused_parameter_has_one_a_and_the_rows_of_each_part() -> None:
    lora = LoraSection(rank=2)
    first = held(MOE, Layout(), lora, TRAINER)[0]
    assert (first.parameter, first.num_pairs) == ("decoder.layers.0.self_attention.linear_qkv.weight", 1)
    assert (first.a.tensor.shape, first.b.tensor.shape) == ((2, 48), (128, 2))
    assert [piece.tensor for piece in first.a.tensor.pieces] == [
        "model.layers.0.self_attn.q_proj.lora_A.weight"
    ]
    changed = changed_tensors(family_of(MOE), MOE, lora)
    key = "model.layers.0.self_attn.k_proj"
    assert changed[f"{key}.weight"] == (
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        f"{key}.lora_B.weight",
    )
    assert len(changed) == 4 * 4


@pytest.mark.parametrize(
    ("hf", "layout", "targets", "words"),
    [
        (MOE, {}, ["shared_experts"], "qwen3_moe model has no shared_experts"),
        (MOE, {}, ["attention", "mlp"], "qwen3_moe model has no mlp"),
        ({"model_type": "gpt_oss", "num_hidden_layers": 4} | COMMON | GPT_OSS, {}, ["routed_experts"],
         "gpt_oss model has no routed_experts"),
        (DEEPSEEK, {"pp": 4}, ["routed_experts"], "layers 0 to 0, a chunk of a pipeline stage"),
    ],
)  # fmt: skip
def test_what_would_train_nothing_is_refused(hf, layout, targets, words) -> None:
    with pytest.raises(ConfigError, match=words):
        held(hf, Layout(**layout), LoraSection(targets=tuple(targets)), TRAINER)


def test_routed_experts_that_are_cut_are_refused() -> None:
    layout, lora = LayoutSection(tp=2, etp=2), LoraSection(targets=("routed_experts",))
    with pytest.raises(ValueError, match="etp = 2 is not implemented"):
        TrainingSection(layout=layout, lora=lora)


def test_a_published_model_has_its_adapters() -> None:
    """Qwen3-30B-A3B: rank 16 of q, k, v (one A) and o, for each layer."""
    hf = json.loads(Path(CONFIGS / "models/Qwen3-30B-A3B/config.json").read_text())
    layer = 16 * (2048 + 4096 + 2 * 512) + 16 * (4096 + 2048)
    assert num_elements(family_of(hf), hf, LoraSection()) == 48 * layer


def test_what_is_not_changed_keeps_its_bits() -> None:
    base = torch.tensor([[-0.0, 1.0, 3.0]], dtype=torch.bfloat16)
    a, b = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[2.0]])
    after = merged(base, a, b, scale=0.25)
    assert torch.equal(after.view(torch.int16)[:, :2], base.view(torch.int16)[:, :2])
    assert after[0, 2] == 3.5


def test_modules_are_told_by_their_last_parts_unless_that_says_too_much() -> None:
    tensors = ["m.0.mlp.up_proj.weight", "m.1.mlp.up_proj.weight", "m.1.norm.weight"]
    assert target_modules(tensors[:2], tensors) == ["up_proj"]
    assert target_modules(tensors[1:2], tensors) == ["m.1.mlp.up_proj"]
