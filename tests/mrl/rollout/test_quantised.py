"""Engines that cannot have quantised weights are refused before they start; others get exact settings."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from benchmarks.resharding.models import TINY
from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError
from mrl.rollout.quantised import quantised_overrides
from tests.published import INT4, publish
from tests.tiny_models import write_model

HF = TINY | {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 256}


def folder(path: Path, **changes: Any) -> str:
    (path / "config.json").write_text(json.dumps(HF | changes))
    return str(path)


def told(path: str, *, real_weights: bool = False, **fields: Any) -> dict[str, Any]:
    return quantised_overrides(RolloutSection(**fields), path, on_cpu=False, real_weights=real_weights)


def test_an_engine_of_wide_weights_is_told_nothing(tmp_path: Path) -> None:
    assert told(folder(tmp_path), tp=2) == told(folder(tmp_path), real_weights=True) == {}


def test_a_quantised_engine_keeps_its_routers_and_output_layer_wide(tmp_path: Path) -> None:
    settings = told(folder(tmp_path), tp=2, quantization="fp8_block")["quantization_config"]
    assert settings["quant_method"] == "fp8" and settings["weight_block_size"] == [128, 128]
    kept = set(settings["modules_to_not_convert"])
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.3.mlp.gate"} <= kept
    assert not any("proj" in name or "experts" in name for name in kept)


def test_a_folder_of_float8_weights_serves_wide_ones_unless_asked_for_or_read_itself(tmp_path: Path) -> None:
    published = folder(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert told(published) == {"quantization_config": None}
    served = told(published, quantization="fp8_block")
    assert served["quantization_config"]["modules_to_not_convert"]


def test_an_engine_that_reads_float8_weights_is_told_of_what_has_no_scales(tmp_path: Path) -> None:
    """The list is complete for all tensor names, even if the folder's own list is not."""
    source = write_model(tmp_path / "source", "qwen3_5_moe", dtype=torch.bfloat16)
    publish(source, tmp_path / "published", tmp_path / "wide")
    settings = told(str(tmp_path / "published"), real_weights=True)["quantization_config"]
    kept = set(settings["modules_to_not_convert"])
    assert settings["quant_method"] == "fp8" and settings["weight_block_size"] == [128, 128]
    net, expected = "model.layers.0.linear_attn", ("in_proj_a", "in_proj_b", "conv1d", "norm")
    assert {f"{net}.{module}" for module in expected} == {name for name in kept if name.startswith(net)}
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.3.mlp.shared_expert_gate"} <= kept
    assert not any(name.endswith(("_proj", "in_proj_qkv", "in_proj_z")) for name in kept)


def test_a_folder_of_int4_weights_serves_wide_ones_and_is_read_itself_by_gpus(tmp_path: Path) -> None:
    published = folder(tmp_path, quantization_config=INT4)
    assert told(published) == {"quantization_config": None}
    assert told(published, real_weights=True) == {}
    with pytest.raises(ConfigError, match=r"contains compressed-tensors weights, .* only on GPUs; evaluate"):
        quantised_overrides(RolloutSection(), published, on_cpu=True, real_weights=True)


def test_a_folder_of_mxfp4_weights_serves_wide_ones_unless_it_is_read_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's gpt-oss reads the method of any `quantization_config`, even a null one."""
    published = folder(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert told(published) == {"quantization_config": {"quant_method": ""}}
    assert told(published, real_weights=True) == {}
    for has_kernels in (True, False):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda has=has_kernels: has)
        expected = contextlib.nullcontext() if has_kernels else pytest.raises(ConfigError, match="mrl export")
        with expected:
            assert quantised_overrides(RolloutSection(), published, on_cpu=True, real_weights=True) == {}


def test_a_split_inside_a_block_is_named_with_a_way_out(tmp_path: Path) -> None:
    narrow = folder(tmp_path, moe_intermediate_size=128)
    told(narrow, tp=1, quantization="fp8_block")
    with pytest.raises(ConfigError, match=r"rollout.tp = 2: .*block of 128; lower rollout.tp"):
        told(narrow, tp=2, quantization="fp8_block")
    with pytest.raises(
        ConfigError, match=r"rollout.tp = 1: .*block of 128; the model is too narrow, set it to none"
    ):
        told(
            folder(tmp_path, moe_intermediate_size=128, num_key_value_heads=1, head_dim=64),
            quantization="fp8_block",
        )


def test_weights_of_a_folder_are_not_quantised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set it to none"):
        told(folder(tmp_path), quantization="fp8_block", real_weights=True)


def test_activations_are_bfloat16() -> None:
    with pytest.raises(ValidationError, match=r"needs rollout.dtype = bfloat16 \(got float32\)"):
        RolloutSection(quantization="fp8_block", dtype="float32")
