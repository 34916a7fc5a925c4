"""Parameter counts against the published configurations and transformers' own models."""

import json
import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from mrl.capacity import requirements
from mrl.capacity.hardware import load_hardware
from mrl.capacity.model_facts import find_facts
from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.loops.throughput import peak_flops
from mrl.models.facts import ModelSize
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.models.rope import rope_settings
from mrl.prepare.new_model import ensure_model

PUBLISHED = {
    # Elements of the published safetensors without draft layers and image models, with correction biases.
    "Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704),
    "Qwen3-235B-A22B": (235_093_634_560, 22_190_763_520),
    "Qwen3-235B-A22B-Instruct-2507": (235_093_634_560, 22_190_763_520),
    "Qwen3-VL-8B-Instruct": (8_190_735_360, 8_190_735_360),
    "Qwen3-VL-30B-A3B-Instruct": (30_532_122_624, 3_353_032_704),
    "Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 3_874_929_408),
    "Qwen3.5-9B": (8_953_803_264, 8_953_803_264),
    "Qwen3.5-35B-A3B": (34_660_610_688, 3_454_988_928),
    "Qwen3.6-27B": (26_895_998_464, 26_895_998_464),
    "DeepSeek-V3": (671_026_419_200, 37_552_297_472),
    "Qwen2.5-0.5B-Instruct": (494_032_768, 494_032_768),
    "Qwen2.5-7B": (7_615_616_512, 7_615_616_512),
    "Qwen1.5-MoE-A2.7B": (14_315_784_192, 2_689_173_504),
    "Llama-3.1-8B": (8_030_261_248, 8_030_261_248),
    "Llama-3.2-1B": (1_235_814_400, 1_235_814_400),
    "Llama-3.2-1B-Instruct": (1_235_814_400, 1_235_814_400),
    "Ministral-3-8B-Base-2512": (8_489_553_920, 8_489_553_920),
    "Seed-OSS-36B-Instruct": (36_151_104_512, 36_151_104_512),
    "SmolLM3-3B": (3_075_098_624, 3_075_098_624),
    "phi-4": (14_659_507_200, 14_659_507_200),
    "OLMoE-1B-7B": (6_919_161_856, 1_282_017_280),
    "MiniMax-M2": (228_689_764_864, 11_030_553_088),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    "Moonlight-16B-A3B-Instruct": (15_960_110_208, 2_914_776_192),
    "Kimi-K2-Instruct": (1_026_408_232_448, 32_861_500_928),
    "Kimi-K2.5": (1_026_408_232_448, 32_861_500_928),
    "GLM-4.5-Air": (106_852_251_264, 13_424_129_664),
    "GLM-4.5": (352_797_829_024, 33_632_266_144),
    "GLM-4.7-Flash": (29_943_393_920, 3_896_766_080),
}

TINY = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "expert_size": 16,
    "num_experts": 4,
    "num_experts_per_token": 2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_exact(name: str) -> None:
    facts = find_facts(ModelSection(path=f"weights/{name}"))
    total, active = PUBLISHED[name]
    assert facts.parameters_total == total
    assert facts.parameters_active == active


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_agree_with_transformers(name: str) -> None:
    """transformers builds the model on the meta device; router correction biases are buffers there."""
    import transformers

    hf = json.loads((CONFIGS / "models" / name / "config.json").read_text())
    config = transformers.AutoConfig.for_model(**(hf | {"model_type": family_of(hf).model_type}))
    kind = "ImageTextToText" if "vision_config" in hf else "CausalLM"
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    text = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    count = sum(p.numel() for p in text)
    count += sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    assert count == PUBLISHED[name][0]


def test_a_models_own_folder_comes_first(tmp_path) -> None:
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    hf = json.loads((CONFIGS / "models" / "Qwen3-30B-A3B" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"num_hidden_layers": 2}))
    facts = find_facts(ModelSection(path=str(folder)))
    assert facts.num_layers == 2
    assert facts.origin == str(folder / "config.json")


def test_a_new_model_needs_no_folder() -> None:
    facts = find_facts(ModelSection.model_validate({"path": "nowhere", "new": {"vocab_size": 500}}))
    tensors = facts.family.checkpoint_tensors(facts.hf)
    assert facts.vocab == 512
    assert facts.parameters_total == sum(math.prod(t.shape) for t in tensors)


@pytest.mark.parametrize("family", get_args(NewModelSection.model_fields["family"].annotation))
def test_a_new_model_is_planned_as_it_will_be_made(family: str, tmp_path: Path) -> None:
    """The plan uses all of the made folder's config.json, and a run would refuse none of it."""
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 1 + 2?", "answer": "3"}\n')
    model = ModelSection.model_validate({"path": str(folder), "new": {**TINY, "family": family}})
    planned = find_facts(model).hf
    ensure_model(model, [str(rows)], seed=0)
    made = find_facts(model).hf
    told_when_made = {"vocab_size", "architectures", "dtype", "pad_token_id"}
    assert {k: v for k, v in planned.items() if k not in told_when_made} == {
        k: v for k, v in made.items() if k not in told_when_made
    }
    assert rope_settings(planned) and requirements.layout_errors(planned, Layout(), lora=None) == []


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="configs/models has only"):
        find_facts(ModelSection(path="weights/of/unknown"))


def test_hardware_by_name_and_by_file(tmp_path) -> None:
    known = load_hardware("8x80gb")
    path = tmp_path / "mine.yaml"
    path.write_text((CONFIGS / "hardware" / "8x80gb.yaml").read_text() + "training_efficiency: 0.5\n")
    assert load_hardware(path).training_efficiency == 0.5
    assert load_hardware(path).peak_flops == known.peak_flops
    with pytest.raises(ConfigError, match="neither a file nor one of"):
        load_hardware("8x8gb")
    path.write_text("gpus: 8\n")
    with pytest.raises(ConfigError, match="does not describe hardware"):
        load_hardware(path)


def test_operations_of_a_training_token_are_palms() -> None:
    """6 N + 12 L H Q T with half of the pairs (arXiv 2204.02311, app. B); N: parameters, no lookup."""
    facts, length = find_facts(ModelSection(path="weights/Qwen3-30B-A3B")), 4096
    parameters = PUBLISHED["Qwen3-30B-A3B"][1] - 151936 * 2048
    layers, heads, width = 48, 32, 128
    trained = 3 * facts.forward_flops(length, length**2 / 2) / length
    assert trained == 6 * parameters + 12 * layers * heads * width * length / 2


@pytest.mark.parametrize("tied", [False, True])
def test_operations_agree_with_those_torch_counts(tied: bool) -> None:
    """torch counts only products, and all pairs; norms are the difference."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    hf = transformers.Qwen3Config(**shape, **heads, tie_word_embeddings=tied, attn_implementation="eager")
    model, length = transformers.AutoModelForCausalLM.from_config(hf), 96
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long))
    facts = ModelSize(hf.to_dict() | {"model_type": "qwen3"}, "test")
    norms = 3 * (2 * 256 + 2 * 32) + 256
    ours = facts.forward_flops(length, length**2) - 2 * norms * length
    assert ours == counter.get_total_flops()
    assert (
        facts.forward_flops(length, 0) - facts.forward_flops(length, 0, has_head=False)
        == 2 * 256_000 * length
    )


@pytest.mark.parametrize(
    ("hardware", "device"),
    [("1x80gb", "NVIDIA H100 80GB HBM3"), ("8x80gb", "NVIDIA H100 80GB HBM3"), ("8x141gb", "NVIDIA H200")],
)
def test_a_plan_and_a_run_know_the_same_peak(hardware: str, device: str) -> None:
    assert load_hardware(hardware).peak_flops == peak_flops(device, "bfloat16")
