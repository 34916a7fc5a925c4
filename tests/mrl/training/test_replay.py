"""A pass with given routes takes them, the same in every layout, and reports the routers' agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.sections.lora import LoraSection
from mrl.config.sections.training import LayoutSection
from tests.mrl.training import replays
from tests.mrl.training.layouts import name_of
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, write_model

pytestmark = pytest.mark.integration

LORA = LoraSection(rank=3, targets=["attention", "routed_experts"])
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("qwen3_moe", {"tp": 2, "pp": 2, "vpp": 2, "ep": 2}, {"recompute": "full"}),
    ("qwen3_moe", {"cp": 2}, {}),
    ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}, {"lora": LORA}),
]
LONG_CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("qwen3_moe", {"cp": 2, "dp": 2, "ep": 2}, {"lora": LORA, "recompute": "selective"}),
    ("deepseek_v3", {"cp": 2, "pp": 2, "vpp": 2}, {}),
    ("deepseek_v3", {"tp": 2, "pp": 2, "ep": 2}, {"recompute": "full"}),
]


def _name(value: dict[str, Any]) -> str:
    if not {"lora", "recompute"}.isdisjoint(value) or not value:
        return "adapters" if "lora" in value else ""
    return name_of(value)


class OneRank:
    """A family's folder and one rank's results from it."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, {}

    def of(self, family: str, lora: LoraSection | None = None) -> tuple[Path, dict[str, Any]]:
        kind = f"{family}-adapters" if lora else family
        if kind not in self._made:
            folder = write_model(self._root / kind, family)
            changes = {"lora": lora} if lora else {}
            (result,) = run_ranks(replays.record_and_replay, 1, str(folder), {}, changes)
            self._made[kind] = folder, result
        return self._made[kind]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(tmp_path_factory.mktemp("replay"))


@pytest.mark.parametrize(
    ("family", "layout", "changes"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG_CASES)],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
def test_every_layout_takes_the_routes_it_is_given(family, layout, changes, one_rank) -> None:
    folder, expected = one_rank.of(family, changes.get("lora"))
    world = LayoutSection(**layout).world_size
    results = run_ranks(replays.record_and_replay, world, str(folder), layout, changes)
    batch = random_batch(10, seed=1)
    outputs = [result for result in results if result["given"] is not None]
    assert sorted(np.concatenate([r["samples"] for r in outputs]).tolist()) == list(range(10))
    for result in outputs:
        index = batch.positions(result["samples"])
        for name in ("given", "reference", "after"):
            np.testing.assert_allclose(
                result[name]["logprobs"], expected[name]["logprobs"][index], atol=1e-5, err_msg=name
            )
        ours, theirs = result["recorded"]["routes"], expected["recorded"]["routes"][index]
        np.testing.assert_array_equal(np.sort(ours, axis=2), np.sort(theirs, axis=2))
    for result in results:
        for name in ("loss", "grad_norm", "routing/agreement", "routing/agreement_min"):
            assert result["metrics"][name] == pytest.approx(expected["metrics"][name], abs=2e-5), name


@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen3_moe", None), ("qwen3_moe", LORA), pytest.param("deepseek_v3", None, marks=pytest.mark.slow)],
)
def test_given_routes_are_others_and_the_reference_takes_them_too(family, lora, one_rank) -> None:
    """Before the first update policy and reference are equal, so that their KL is exactly 0."""
    _, result = one_rank.of(family, lora)
    given, recorded = result["given"]["logprobs"], result["recorded"]["logprobs"]
    assert np.abs(given - recorded).max() > 0.1
    np.testing.assert_array_equal(given, result["reference"]["logprobs"])
    assert np.abs(given - result["after"]["logprobs"]).max() > 1e-3
    topk = result["recorded"]["routes"].shape[2]
    assert result["metrics"]["routing/agreement"] == pytest.approx(topk / replays.EXPERTS, abs=0.05)


def test_a_pass_that_is_given_its_own_choices_is_itself(one_rank: OneRank) -> None:
    """Equal up to rounding: padding visits other experts, and products of other rows round differently."""
    folder, _ = one_rank.of("qwen3_moe")
    (result,) = run_ranks(replays.replay_own, 1, str(folder), {})
    np.testing.assert_allclose(result["first"]["logprobs"], result["again"]["logprobs"], atol=2e-6)
    replayed = result["own"]
    assert (replayed.pop("routing/agreement"), replayed.pop("routing/agreement_min")) == (1.0, 1.0)
    assert replayed["loss"] == pytest.approx(result["plain"]["loss"], abs=1e-6)
    assert "sample 3.0 has 1 rows of routes for" in result["errors"][0]
    assert "sample 2.0 has" in result["errors"][1] and "1 not recorded" in result["errors"][1]
