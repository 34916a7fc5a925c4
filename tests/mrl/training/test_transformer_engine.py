"""Transformer Engine layers, on a stand-in package: the same numbers, names and checkpoints as local ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.mrl.training import scenarios
from tests.mrl.training.layouts import OneRank, check_layout, name_of, require_close
from tests.ranks import run_ranks
from tests.support.transformer_engine import FOLDER

pytestmark = pytest.mark.integration


LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"tp": 2, "ep": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2}),
    ("qwen3_next", {"cp": 2, "ep": 2}),
]
LONG_LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("qwen2_moe", {"tp": 2, "ep": 2}),  # gated shared experts
    ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}),
    ("qwen3_moe", {"cp": 2, "tp": 2}),
    ("minimax_m2", {"tp": 2, "ep": 2}),  # norms over a whole projection
    ("deepseek_v3", {"pp": 2, "vpp": 2}),
    ("qwen3_5", {"tp": 2}),
    ("smollm3", {"pp": 2, "vpp": 2}),  # layers without rotary embedding, numbered over stages
]
"""Each kind of layer that has a form of its own in Transformer Engine."""


def check(family: str, layout: dict[str, int], one_rank_of: OneRank, out: Path) -> None:
    folder, expected = one_rank_of.of(family)
    check_layout(layout, folder, expected, out, stand_ins=FOLDER, spec="transformer_engine")


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=lambda v: v if isinstance(v, str) else name_of(v))
def test_layout(family: str, layout: dict[str, int], one_rank_of: OneRank, tmp_path: Path) -> None:
    check(family, layout, one_rank_of, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"), LONG_LAYOUTS, ids=lambda v: v if isinstance(v, str) else name_of(v)
)
def test_long_layout(family: str, layout: dict[str, int], one_rank_of: OneRank, tmp_path: Path) -> None:
    check(family, layout, one_rank_of, tmp_path)


@pytest.mark.slow
def test_selective_recompute_changes_nothing(one_rank_of: OneRank, tmp_path: Path) -> None:
    folder, expected = one_rank_of.of("qwen3_moe")
    changes = {"spec": "transformer_engine", "recompute": "selective"}
    check_layout({}, folder, expected, tmp_path, stand_ins=FOLDER, **changes)


def in_bfloat16(spec: str, folder: Path, out: Path) -> dict[str, Any]:
    changes = {"spec": spec, "dtype": "bfloat16"}
    arguments = str(folder), {}, str(out / spec), changes
    return run_ranks(scenarios.forward_update_export, 1, *arguments, stand_ins=FOLDER)[0]


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "deepseek_v3"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("smollm3", "ministral3")),
    ],
)
def test_bfloat16_takes_the_fused_attention(family: str, one_rank_of: OneRank, tmp_path: Path) -> None:
    """The stand-in's attention refuses float32, and keys and values of unequal width (DeepSeek-V3)."""
    folder, expected = one_rank_of.of(family)
    result = in_bfloat16("transformer_engine", folder, tmp_path)
    gap = np.abs(result["arrays"]["logprobs"] - expected["arrays"]["logprobs"])
    assert 0 < gap.mean() < 0.03  # bfloat16's rounding; a near tie sends a token to other experts
    for ours, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("deepseek_v3", "qwen3_next")),
    ],
)
@pytest.mark.parametrize("specs", [("transformer_engine", "local"), ("local", "transformer_engine")], ids=str)
def test_a_checkpoint_of_one_spec_goes_on_in_the_other(specs, family, one_rank_of, tmp_path) -> None:
    """In another layout too: parameters, moments and step count are the saved run's."""
    folder, _ = one_rank_of.of(family)
    first, second = specs
    saving = str(folder), {"tp": 2, "ep": 2}, str(tmp_path), "float32", first
    before = run_ranks(scenarios.save_then_go_on, 2, *saving, stand_ins=FOLDER)
    resuming = str(folder), {}, str(tmp_path / "step-00000002"), str(tmp_path / "resumed"), "float32", second
    (after,) = run_ranks(scenarios.resume_and_go_on, 1, *resuming, stand_ins=FOLDER)
    assert after["steps"] == 2
    for ours, theirs in zip(after["metrics"], before[0]["metrics"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5, rel=3e-5 if family == "qwen3_next" else None)
    resumed, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("resumed", "after-0-2")
    )
    require_close(resumed, expected)
