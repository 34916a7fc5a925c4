"""Context parallelism on real ranks: every layout with it computes, trains and exports the same as one rank and transformers.

A good part of the batch's samples is shorter than 2 cp tokens or no multiple of it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mrl.training.layouts import OneRank, check_layout, name_of

pytestmark = pytest.mark.engine

LAYOUTS = [
    ("qwen3_moe", {"cp": 2, "ep": 2}),
    ("qwen3_moe", {"cp": 2, "tp": 2}),
    ("deepseek_v3", {"cp": 2}),
]
LONG_LAYOUTS = [
    ("qwen3_moe", {"cp": 2}),
    ("qwen3_moe", {"cp": 2, "pp": 2}),
    ("qwen3_moe", {"cp": 2, "pp": 2, "vpp": 2}),
    ("qwen3_moe", {"cp": 2, "dp": 2, "ep": 2}),
    ("qwen3_moe", {"cp": 2, "tp": 2, "etp": 2, "ep": 2}),
    ("qwen3_moe", {"cp": 4, "ep": 2}),
    ("qwen3", {"cp": 3}),
    ("deepseek_v3", {"cp": 2, "tp": 2, "ep": 2}),
    ("deepseek_v3", {"cp": 2, "pp": 2}),
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(tmp_path_factory.mktemp("one"))


def check(family: str, layout: dict[str, int], one_rank: OneRank, out: Path) -> None:
    folder, expected = one_rank.of(family)
    results = check_layout(layout, folder, expected, out)
    for result in results:
        if result["arrays"] is not None and layout.get("dp", 1) == 1:
            margins = result["arrays"]["router_margin"], expected["arrays"]["router_margin"]
            np.testing.assert_allclose(*margins, atol=1e-5)


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=lambda x: x if isinstance(x, str) else name_of(x))
def test_layout(family: str, layout: dict[str, int], one_rank: OneRank, tmp_path: Path) -> None:
    check(family, layout, one_rank, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"), LONG_LAYOUTS, ids=lambda x: x if isinstance(x, str) else name_of(x)
)
def test_long_layout(family: str, layout: dict[str, int], one_rank: OneRank, tmp_path: Path) -> None:
    check(family, layout, one_rank, tmp_path)
