"""Unsupported settings of config.json are errors with the key's name; the published models have none."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.models.engine_rows import Shard
from mrl.models.families import FAMILIES, family_of, require_trainable
from mrl.models.families.unsupported_models import REFUSED
from mrl.models.hf_config import language_model
from tests import tiny_models
from tests.published import INT4

PUBLISHED = Path(__file__).parents[2] / "configs" / "models"
SHAPE = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": 1e6,
}  # fmt: skip
QWEN3 = SHAPE | {"model_type": "qwen3"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
QWEN2_MOE = SHAPE | EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA = SHAPE | {"model_type": "llama", "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}}
MIXTRAL = SHAPE | {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
DEEPSEEK = json.loads((PUBLISHED / "DeepSeek-V3" / "config.json").read_text(encoding="utf-8"))
YARN = DEEPSEEK["rope_scaling"]
OLMOE, MINIMAX, GPT_OSS, PHI = (
    json.loads((PUBLISHED / name / "config.json").read_text(encoding="utf-8"))
    for name in ("OLMoE-1B-7B", "MiniMax-M2", "gpt-oss-20b", "phi-4")
)
QWEN35 = language_model(
    json.loads((PUBLISHED / "Qwen3.5-35B-A3B" / "config.json").read_text(encoding="utf-8"))
)
SEED, SMOLLM3, MINISTRAL3, QWEN3_VL = (
    language_model(json.loads((PUBLISHED / name / "config.json").read_text(encoding="utf-8")))
    for name in (
        "Seed-OSS-36B-Instruct", "SmolLM3-3B", "Ministral-3-8B-Base-2512", "Qwen3-VL-30B-A3B-Instruct"
    )
)  # fmt: skip
GROWING = MINISTRAL3["rope_parameters"]
KIMI, GLM, FLASH = (
    json.loads((PUBLISHED / name / "config.json").read_text(encoding="utf-8"))
    for name in ("Kimi-K2-Instruct", "GLM-4.5", "GLM-4.7-Flash")
)


def wrong_groups(**changes: object) -> dict[str, Any]:
    """Return Kimi-K2-Thinking's int4 settings with changed weights."""
    settings = copy.deepcopy(INT4)
    settings["config_groups"]["group_0"]["weights"] |= changes
    return settings


@pytest.mark.parametrize("folder", sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir()))
def test_published_models_are_implemented(folder: str) -> None:
    hf = json.loads((PUBLISHED / folder / "config.json").read_text(encoding="utf-8"))
    require_trainable(language_model(hf))


@pytest.mark.parametrize(("hf", "changes", "named"), [
    (QWEN3, {"layer_types": ["sliding_attention"]},
     "layer_types with sliding_attention (supported: full_attention)"),
    (QWEN3, {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    (QWEN3, {"use_sliding_window": True}, "use_sliding_window = True"),
    (QWEN3, {"attention_bias": True}, "attention_bias = True"),
    (QWEN3, {"rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic' (supported: 'default', 'yarn')"),
    (QWEN3, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor of rope_type 'yarn'"),
    (QWEN35, {"rope_parameters": YARN}, "rope_type = 'yarn' (supported: 'default')"),
    (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 (supported: 1)"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias = True (supported: None, False)"),
    (LLAMA, {"rope_scaling": LLAMA3 | {"mscale": 1.0}}, "mscale of rope_type 'llama3'"),
    (QWEN2_MOE, {"qkv_bias": False}, "qkv_bias = False (supported: None, True)"),
    (MIXTRAL, {"sliding_window": 4096}, "sliding_window = 4096 (supported: None)"),
    (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act = 'gelu' (supported: None, 'silu')"),
    (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func = 'softmax' (supported: 'sigmoid')"),
    (DEEPSEEK, {"topk_method": None}, "topk_method = None (supported: 'noaux_tc')"),
    (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob = False"),
    (DEEPSEEK, {"rope_interleave": False}, "rope_interleave = False"),
    (DEEPSEEK, {"topk_group": 2}, "num_experts_per_tok = 8 with topk_group = 2"),
    (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor of rope_type 'yarn'"),
    (KIMI, {"topk_method": "greedy"}, "topk_method = 'greedy' (supported: 'noaux_tc')"),
    (KIMI, {"quantization_config": INT4 | {"format": "int-quantized"}}, "'format': 'int-quantized'"),
    (KIMI, {"quantization_config": wrong_groups(group_size=128)},
     ", pack-quantized int4 in groups of 32, a copy in"),
    (KIMI, {"quantization_config": wrong_groups(num_bits=8)},
     "quantization_config = {'quant_method': 'compressed-tensors'"),
    (KIMI, {"quantization_config": wrong_groups(symmetric=False)}, "'symmetric': False"),
    (KIMI, {"quantization_config": INT4 | {"kv_cache_scheme": {"num_bits": 8}}},
     "'kv_cache_scheme': {'num_bits': 8}"),
    (GLM, {"norm_topk_prob": False}, "norm_topk_prob = False (supported: True)"),
    (GLM, {"rope_scaling": YARN}, "rope_type = 'yarn' (supported: 'default')"),
    (FLASH, {"scoring_func": "softmax"}, "scoring_func = 'softmax' (supported: None, 'sigmoid')"),
    (FLASH, {"attention_bias": True}, "attention_bias = True (supported: None, False)"),
    (FLASH, {"mlp_layer_types": ["sparse"] * 47},
     "mlp_layer_types (supported: those of first_k_dense_replace"),
    (DEEPSEEK, {"rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic' (supported: 'default', 'yarn')"),
    (OLMOE, {"norm_topk_prob": True}, "norm_topk_prob = True (supported: None, False)"),
    (OLMOE, {"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06 (supported: 1e-05)"),
    (OLMOE, {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    (OLMOE, {"head_dim": 64}, "head_dim = 64 (supported: hidden_size / num_attention_heads = 2048 / 16)"),
    (MINIMAX, {"scoring_func": "softmax"}, "scoring_func = 'softmax' (supported: 'sigmoid')"),
    (MINIMAX, {"use_routing_bias": False}, "use_routing_bias = False"),
    (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
    (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list with values other than 1"),
    (GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit = 5.0 (supported: None, 7.0)"),
    (GPT_OSS, {"attention_bias": False}, "attention_bias = False (supported: True)"),
    (GPT_OSS, {"layer_types": ["full_attention"] * 24},
     "layer_types (supported: alternating sliding_attention"),
    (GPT_OSS, {"quantization_config": {"quant_method": "fp8"}},
     "'fp8'} (supported: mxfp4, a copy in bfloat16)"),
    (SEED, {"attention_dropout": 0.2}, "attention_dropout = 0.2 (supported: None, 0, 0.1)"),
    (SEED, {"attention_out_bias": True}, "attention_out_bias = True (supported: None, False)"),
    (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window = True (supported: None, False)"),
    (MINISTRAL3, {"sliding_window": 4096}, "sliding_window = 4096 (supported: None)"),
    (LLAMA, {"rope_scaling": GROWING}, "llama_4_scaling_beta of rope_type 'yarn'"),
    (QWEN3_VL, {"norm_topk_prob": False}, "norm_topk_prob = False (supported: None, True)"),
    (PHI, {"sliding_window": 2047}, "sliding_window = 2047 (supported: None)"),
    (PHI, {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
     "rope_type = 'longrope' (supported: 'default')"),
    (PHI, {"resid_pdrop": 0.1}, "resid_pdrop = 0.1 (supported: None, 0)"),
    (OLMOE, {"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'} (supported: fp8 e4m3 in blocks"),
])  # fmt: skip
def test_others_are_named(hf: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    require_trainable(hf)
    with pytest.raises(ConfigError) as error:
        require_trainable(hf | changes)
    assert named in str(error.value)
    assert f"which training does not implement for {hf['model_type']}" in str(error.value)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_key_that_nobody_reads_is_named(family: str, tmp_path: Path) -> None:
    """Nothing in the config.json that transformers writes for each family is refused."""
    tiny_models.tiny_config(family).save_pretrained(tmp_path)
    hf = language_model(json.loads((tmp_path / "config.json").read_text()))
    require_trainable(hf | {"router_warmth": None, "pruned_heads": {}, "use_cache": False})
    for key, value in {"router_warmth": 3, "pruned_heads": {"0": [1]}}.items():
        with pytest.raises(ConfigError, match=rf"config\.json has {key} = .*, which are unknown for "):
            require_trainable(hf | {key: value})


def test_two_spellings_of_one_key_are_both_read() -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    for fmt in ("e4m3", "float8_e4m3fn"):
        require_trainable(MINIMAX | {"quantization_config": quantised | {"fmt": fmt}})
    with pytest.raises(ConfigError, match="fmt"):
        require_trainable(MINIMAX | {"quantization_config": quantised | {"fmt": "e5m2"}})
    require_trainable(QWEN2_MOE | {"num_local_experts": 4, "rope_parameters": {"rope_theta": 1e6}})


def test_tied_embeddings_are_read_as_transformers_reads_them() -> None:
    """The top level decides for text beside images; SmolLM3's config.json may omit the key if it is true."""
    text = {"text_config": {"tie_word_embeddings": True}}
    assert language_model({"model_type": "qwen3_vl_moe", "tie_word_embeddings": False} | text) == {
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
    }  # fmt: skip
    assert language_model({"model_type": "qwen3_vl_moe"} | text)["tie_word_embeddings"] is True
    assert language_model({"model_type": "smollm3"})["tie_word_embeddings"] is True
    untied = {"model_type": "smollm3", "tie_word_embeddings": False}
    assert language_model(untied) == untied
    assert "tie_word_embeddings" not in language_model({"model_type": "llama"})


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_known_of_other_models_is_said(model_type: str) -> None:
    why, nearest = REFUSED[model_type]
    assert model_type not in FAMILIES and nearest in FAMILIES
    with pytest.raises(ConfigError) as error:
        family_of({"model_type": model_type})
    assert f"{model_type!r} in config.json is not supported" in str(error.value)
    assert f"{why}; the most similar family is {nearest}" in str(error.value)


def test_images_are_refused_as_such() -> None:
    with pytest.raises(
        ConfigError, match=r"'new_vl' in config\.json is not supported: training on images is not"
    ):
        family_of({"model_type": "new_vl", "vision_config": {}})


@pytest.mark.parametrize("hf", [
    json.loads((PUBLISHED / name / "config.json").read_text()) for name in ("DeepSeek-V3", "Qwen3-30B-A3B")
], ids=["deepseek_v3", "qwen3_moe"])  # fmt: skip
def test_no_name_table_leaves_an_attention_bias_out(hf: dict[str, Any]) -> None:
    """Planning uses only the tables."""
    biased = hf | {"attention_bias": True}
    family = family_of(hf)
    for table in (family.checkpoint_tensors, lambda config: family.engine_tensors(config, Shard(1, 0))):
        assert table(hf)
        with pytest.raises(ConfigError, match="attention_bias = true"):
            table(biased)
