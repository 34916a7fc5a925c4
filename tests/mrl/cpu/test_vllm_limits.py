"""Shapes that vLLM's CPU kernels cannot run are refused before an engine starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.cpu.vllm_limits import check_cpu, cpu_overrides
from mrl.errors import ConfigError
from mrl.models import rope
from mrl.models.kernels.rotary import inverse_frequencies

GOOD = {"num_attention_heads": 4, "hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64}


LATENT = {"head_dim": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def folder(path: Path, **changes: Any) -> str:
    (path / "config.json").write_text(json.dumps(GOOD | changes))
    return str(path)


@pytest.mark.parametrize("tp", [1, 2])
def test_fitting_shapes_pass(tmp_path: Path, tp: int) -> None:
    check_cpu(folder(tmp_path), tp=tp)
    check_cpu(folder(tmp_path, **LATENT), tp=tp)


@pytest.mark.parametrize(
    ("changes", "tp", "reason"),
    [
        ({"head_dim": 16}, 1, "head_dim = 16"),
        ({"head_dim": 0}, 1, "head_dim = 16"),
        ({"moe_intermediate_size": 48}, 1, "moe_intermediate_size = 48"),
        ({"moe_intermediate_size": 96}, 2, r"moe_intermediate_size = 96 at rollout.tp = 2 \(48 per rank\)"),
        ({"hidden_size": 72}, 1, "hidden_size = 72"),
        ({"num_attention_heads": 3}, 2, "num_attention_heads = 3"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 64}, 1,
         r"kv_lora_rank \+ qk_rope_head_dim = 256 \+ 64 \(only 576\)"),
        ({"model_type": "mixtral", "intermediate_size": 96}, 2,
         r"intermediate_size = 96 at rollout.tp = 2 \(48 per rank\)"),
    ],
)  # fmt: skip
def test_others_are_named(tmp_path: Path, changes: dict[str, Any], tp: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_cpu(folder(tmp_path, **changes), tp=tp)


@pytest.mark.parametrize(
    "plain", [{"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, {"rope_theta": 5e4}]
)
def test_plain_rotary_parts_of_latent_attention_become_yarn_of_factor_1(tmp_path, plain) -> None:
    path = folder(tmp_path, **LATENT, **plain, max_position_embeddings=256)
    config = json.loads((tmp_path / "config.json").read_text())
    served = config | cpu_overrides(path)
    assert rope.kind(served) == "yarn"
    angles = [inverse_frequencies(rope.rope(hf, width=64)) for hf in (config, served)]
    torch.testing.assert_close(*angles, rtol=1e-6, atol=0)
    assert rope.rope(served, width=64).scale == 1
    assert cpu_overrides(folder(tmp_path, **plain)) == {}
    assert cpu_overrides(folder(tmp_path, **LATENT, rope_scaling={"type": "yarn", "factor": 4.0})) == {}


def test_experts_that_are_dealt_out_are_as_wide_on_every_rank(tmp_path: Path) -> None:
    narrow = folder(tmp_path, moe_intermediate_size=32)
    check_cpu(narrow, tp=2, expert_parallel=True)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size = 32 at rollout.tp = 2 \(16 per rank\)"):
        check_cpu(narrow, tp=2)
