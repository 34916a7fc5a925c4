"""Shapes that vLLM's CPU kernels cannot run are named before an engine starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.rollout.cpu_limits import check_cpu

GOOD = {"num_attention_heads": 4, "hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64}


def folder(path: Path, **changes: Any) -> str:
    (path / "config.json").write_text(json.dumps(GOOD | changes))
    return str(path)


@pytest.mark.parametrize("tp", [1, 2])
def test_fitting_shapes_pass(tmp_path: Path, tp: int) -> None:
    check_cpu(folder(tmp_path), tp=tp)
    latent = {"head_dim": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    check_cpu(folder(tmp_path, **latent, rope_parameters={"rope_type": "yarn"}), tp=tp)


@pytest.mark.parametrize(
    ("changes", "tp", "what"),
    [
        ({"head_dim": 16}, 1, "head_dim = 16"),
        ({"head_dim": 0}, 1, "head_dim = 16"),
        ({"moe_intermediate_size": 48}, 1, "moe_intermediate_size = 48"),
        ({"moe_intermediate_size": 96}, 2, r"moe_intermediate_size = 96 at rollout.tp = 2 \(48 a rank\)"),
        ({"hidden_size": 72}, 1, "hidden_size = 72"),
        ({"num_attention_heads": 3}, 2, "num_attention_heads = 3"),
        (
            {"kv_lora_rank": 256, "qk_rope_head_dim": 64},
            1,
            r"kv_lora_rank \+ qk_rope_head_dim = 256 \+ 64 \(only 576\)",
        ),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 1, "rope_type = default with kv_lora_rank"),
        (
            {"model_type": "mixtral", "intermediate_size": 96},
            2,
            r"intermediate_size = 96 at rollout.tp = 2 \(48 a rank\)",
        ),
    ],
)
def test_others_are_named(tmp_path: Path, changes: dict[str, Any], tp: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_cpu(folder(tmp_path, **changes), tp=tp)


def test_dealing_experts_out_has_no_kernel(tmp_path: Path) -> None:
    check_cpu(folder(tmp_path), tp=1, expert_parallel=True)
    with pytest.raises(ConfigError, match="expert_parallel"):
        check_cpu(folder(tmp_path), tp=2, expert_parallel=True)
