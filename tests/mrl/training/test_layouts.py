"""Every family in every layout, on real ranks, computes, trains and exports the same as one rank and transformers.

A good part of the batch's samples is shorter than 2 cp tokens or no multiple of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.mrl.training.layouts import CORRECTION, OneRank, check_forward, check_layout, name_of

pytestmark = pytest.mark.integration

LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("qwen3_moe", {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"pp": 2}),
    ("qwen3_moe", {"ep": 2, "dp": 2}),
    ("qwen3_moe", {"pp": 2, "vpp": 2}),
    ("qwen3_moe", {"tp": 2, "etp": 2}),
    ("qwen3_moe", {"cp": 2, "tp": 2, "ep": 2}),
    ("mixtral", {"tp": 2, "ep": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2}),
    ("deepseek_v3", {"pp": 2, "vpp": 2}),
    ("deepseek_v3", {"cp": 2}),
]
LONG_LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("qwen3_moe", {"tp": 2}),
    ("qwen3_moe", {"dp": 2}),
    ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}),
    ("qwen3_moe", {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 2, "dp": 2}),
    ("qwen3_moe", {"cp": 2}),
    ("qwen3_moe", {"cp": 2, "ep": 2}),
    ("qwen3_moe", {"cp": 2, "tp": 2}),
    ("qwen3_moe", {"cp": 2, "pp": 2}),
    ("qwen3_moe", {"cp": 2, "pp": 2, "vpp": 2}),
    ("qwen3_moe", {"cp": 2, "dp": 2, "ep": 2}),
    ("qwen3_moe", {"cp": 2, "tp": 2, "etp": 2, "ep": 2}),
    ("qwen3_moe", {"cp": 4, "ep": 2}),
    ("qwen3", {"cp": 3}),
    ("mixtral", {"dp": 2}),
    ("mixtral", {"tp": 2, "pp": 2, "ep": 2}),
    ("mixtral", {"tp": 2, "etp": 2}),
    ("deepseek_v3", {"dp": 2}),
    ("deepseek_v3", {"tp": 2, "pp": 2, "ep": 2}),
    ("deepseek_v3", {"tp": 2, "etp": 2}),
    ("deepseek_v3", {"ep": 2, "dp": 2}),
    ("deepseek_v3", {"cp": 2, "tp": 2, "ep": 2}),
    ("deepseek_v3", {"cp": 2, "pp": 2}),
]


def name(value: str | dict[str, int]) -> str:
    return value if isinstance(value, str) else name_of(value)


def check(family: str, layout: dict[str, int], one_rank_of: OneRank, out: Path, **changes: Any) -> None:
    folder, expected = one_rank_of.of(family)
    for result in check_layout(layout, folder, expected, out, **changes):
        if result["arrays"] is not None and layout.get("dp", 1) == 1:
            margins = result["arrays"]["router_margin"], expected["arrays"]["router_margin"]
            np.testing.assert_allclose(*margins, atol=1e-5)
    before, after = (load_file(f / "model.safetensors") for f in (folder, out / "trained"))
    biases = [name for name in before if name.endswith(CORRECTION)]
    assert len(biases) == (3 if family == "deepseek_v3" else 0)
    for bias in biases:  # frozen, and float32 whatever the weights are
        assert before[bias].any() and torch.equal(before[bias], after[bias]), bias


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_one_rank_agrees_with_transformers(family: str, one_rank_of: OneRank) -> None:
    folder, result = one_rank_of.of(family)
    check_forward([result], folder, bound=1e-5)
    losses = [metrics["loss"] for metrics in result["metrics"]]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=name)
def test_layout(family: str, layout: dict[str, int], one_rank_of: OneRank, tmp_path: Path) -> None:
    check(family, layout, one_rank_of, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), LONG_LAYOUTS, ids=name)
def test_long_layout(family: str, layout: dict[str, int], one_rank_of: OneRank, tmp_path: Path) -> None:
    check(family, layout, one_rank_of, tmp_path)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", {}),
        pytest.param("qwen3_moe", {"cp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"tp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
    ids=name,
)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_nothing(
    recompute: str, family: str, layout: dict[str, int], one_rank_of: OneRank, tmp_path: Path
) -> None:
    check(family, layout, one_rank_of, tmp_path, recompute=recompute)


def test_microbatch_size_changes_nothing(one_rank_of: OneRank, tmp_path: Path) -> None:
    check("qwen3_moe", {}, one_rank_of, tmp_path, microbatch_tokens=1000, logprob_chunk_tokens=7)
