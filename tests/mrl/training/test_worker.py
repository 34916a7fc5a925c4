"""The Megatron worker on real ranks: types, roles, off-loading, refusals (layouts: test_layouts.py)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.config.sections.training import LayoutSection
from mrl.training.router_loads import load_metrics
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import OneRank, check_forward, name_of
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, reference_logprobs, write_model

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(one_rank_of: OneRank) -> Path:
    return one_rank_of.of("qwen3_moe")[0]


@pytest.fixture(scope="module")
def one_rank(one_rank_of: OneRank) -> dict[str, Any]:
    return one_rank_of.of("qwen3_moe")[1]


def test_router_margin_is_a_prefix_minimum(one_rank: dict[str, Any]) -> None:
    margins = one_rank["arrays"]["router_margin"]
    bounds = random_batch(10, seed=1).cu_seqlens
    for start, end in itertools.pairwise(bounds):
        assert margins[start] == 0
        assert (margins[start + 1 : end] > 0).all()
        assert (np.diff(margins[start + 1 : end]) <= 0).all()


def test_expert_load_is_what_the_routers_chose(folder: Path) -> None:
    (metrics,) = run_ranks(scenarios.hand_made_routers, 1, str(folder), {})
    visits = np.zeros((4, 8))
    visits[0, :2] = num_tokens = random_batch(10, seed=1).num_tokens
    visits[1:] = np.repeat(np.bincount(np.arange(num_tokens) % 4, minlength=4), 2)
    assert {n: v for n, v in metrics.items() if n.startswith("moe/")} == load_metrics(visits)
    assert metrics["moe/layers/000/load_max_over_mean"] == metrics["moe/load_max_over_mean_max"] == 4
    assert metrics["moe/load_entropy_min"] == pytest.approx(1 / 3)
    assert metrics["moe/layers/003/load_max_over_mean"] == visits[3].max() * 8 / visits[3].sum()


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=name_of)
def test_dense_model_with_tied_output(layout: dict[str, int], tmp_path: Path) -> None:
    """Uneven pipeline stages with a tied output; the bf16 export of a bf16 folder is the same bytes."""
    dense = write_model(tmp_path / "dense", "qwen3", num_hidden_layers=3, tie_word_embeddings=True)
    world = LayoutSection(**layout).world_size
    results = run_ranks(scenarios.forward_update_export, world, str(dense), layout, str(tmp_path), {})
    check_forward(results, dense)
    original, loaded = (load_file(f / "model.safetensors") for f in (dense, tmp_path / "loaded"))
    assert {name: tensor.tolist() for name, tensor in original.items()} == {
        name: tensor.tolist() for name, tensor in loaded.items()
    }


def test_bfloat16_round_trip_and_training(tmp_path: Path) -> None:
    half = write_model(tmp_path / "half", dtype=torch.bfloat16)
    layout = {"ep": 2, "dp": 2}
    results = run_ranks(
        scenarios.forward_update_export, 2, str(half), layout, str(tmp_path), {"dtype": "bfloat16"}
    )
    original, loaded = (load_file(f / "model.safetensors") for f in (half, tmp_path / "loaded"))
    assert original.keys() == loaded.keys()
    assert all(torch.equal(original[n].view(torch.int16), loaded[n].view(torch.int16)) for n in original)
    losses = [metrics["loss"] for metrics in results[0]["metrics"]]
    assert losses[1] < losses[0]


def test_export_is_what_transformers_loads(folder: Path, one_rank: dict[str, Any], tmp_path: Path) -> None:
    """transformers loads the export after training and computes what the worker computes."""
    result = run_ranks(scenarios.forward_after_export, 1, str(folder), {}, str(tmp_path))[0]
    batch = random_batch(10, seed=1)
    logprobs, _ = reference_logprobs(tmp_path / "trained", batch)
    np.testing.assert_allclose(result["logprobs"], logprobs, atol=1e-5)


def test_reference_role(folder: Path) -> None:
    for result in run_ranks(scenarios.reference_role, 2, str(folder), {"ep": 2, "dp": 2}):
        np.testing.assert_array_equal(result["reference"]["logprobs"], result["before"]["logprobs"])
        assert np.abs(result["policy"]["logprobs"] - result["before"]["logprobs"]).max() > 1e-3
        assert result["same"]
        no_reference, swap_under_lease, offload_under_lease = result["errors"]
        assert "snapshot_reference" in no_reference
        assert "lease" in swap_under_lease and "lease" in offload_under_lease


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_frees_memory_and_changes_nothing(dtype: str, folder: Path) -> None:
    for result in run_ranks(scenarios.offload_and_reload, 2, str(folder), {"ep": 2, "dp": 2}, dtype):
        assert result["resident"] > 100_000
        assert result["gone"] == 0
        assert result["same"]
        assert "reload" in result["refused"]
        assert result["generations"] == (0, 1)
        first, second = (metrics["loss"] for metrics in result["metrics"])
        assert second < first


def test_a_loss_that_is_not_finite_skips_the_step_everywhere(folder: Path, one_rank: dict[str, Any]) -> None:
    results = run_ranks(scenarios.poisoned_update, 2, str(folder), {"ep": 2, "dp": 2})
    for result in results:
        assert result["bad"]["skipped"] == 1.0 and result["unchanged"]
        assert result["good"] == pytest.approx(one_rank["metrics"][0], abs=2e-5)
        assert result["nothing"]["skipped"] == 1.0
        assert result["alone"] == pytest.approx(one_rank["metrics"][1], abs=2e-5)


def test_a_layout_that_does_not_fit_is_one_clear_error(folder: Path) -> None:
    with pytest.raises(AssertionError, match="cannot be split into 3 equal parts"):
        run_ranks(scenarios.worker, 3, str(folder), {"tp": 3})
