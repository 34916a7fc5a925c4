"""Many layouts on real ranks compute, train and export the same as one rank and transformers.

Many samples are shorter than 2 cp tokens or not a multiple of it. Every family: test_family_matrix.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mrl.training.layouts import OneRank, check_family, name_of

pytestmark = pytest.mark.integration

LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("qwen3_moe", {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"pp": 2}),
    ("qwen3_moe", {"pp": 2, "vpp": 2}),
    ("qwen3_moe", {"tp": 2, "etp": 2}),
    ("qwen3_moe", {"cp": 2, "tp": 2, "ep": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2}),
    ("deepseek_v3", {"pp": 2, "vpp": 2}),
]
LONG_LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("qwen3_moe", {"tp": 2, "dp": 2}),  # replicated experts, each with two replicas
    ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}),
    ("qwen3_moe", {"cp": 2, "pp": 2, "vpp": 2}),
    ("qwen3_moe", {"cp": 2, "dp": 2, "ep": 4}),  # experts dealt out over both
    ("qwen3", {"cp": 3}),  # an odd number of shares
    ("qwen3_next", {"pp": 2, "vpp": 2}),  # kinds of layers differ by stage
    ("deepseek_v3", {"tp": 2, "etp": 2}),  # shared experts beside cut ones
]
"""Axes together, if one's code depends on the other; test_family_matrix.py cuts families along all axes."""


def name(value: str | dict[str, int]) -> str:
    return value if isinstance(value, str) else name_of(value)


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=name)
def test_layout(family: str, layout: dict[str, int], one_rank_of: OneRank, tmp_path: Path) -> None:
    check_family(family, layout, one_rank_of, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), LONG_LAYOUTS, ids=name)
def test_long_layout(family: str, layout: dict[str, int], one_rank_of: OneRank, tmp_path: Path) -> None:
    check_family(family, layout, one_rank_of, tmp_path)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", {}),
        pytest.param("deepseek_v3", {"tp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"cp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
    ids=name,
)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_nothing(recompute, family, layout, one_rank_of, tmp_path) -> None:
    check_family(family, layout, one_rank_of, tmp_path, recompute=recompute)


def test_microbatch_size_changes_nothing(one_rank_of: OneRank, tmp_path: Path) -> None:
    check_family("qwen3_moe", {}, one_rank_of, tmp_path, microbatch_tokens=1000, logprob_chunk_tokens=7)
