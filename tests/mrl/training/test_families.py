"""Mixtral and DeepSeek-V3 on real ranks: every layout computes, trains and exports the same as one rank and transformers.

Qwen3 is in test_worker.py; what is here is what these two add.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.mrl.training import scenarios
from tests.mrl.training.layouts import OneRank, check_forward, check_layout, name_of
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, reference_logprobs, write_model

pytestmark = pytest.mark.engine

LAYOUTS = [
    ("mixtral", {"tp": 2, "ep": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2}),
    ("deepseek_v3", {"pp": 2, "vpp": 2}),
]
LONG_LAYOUTS = [
    ("mixtral", {"dp": 2}),
    ("mixtral", {"tp": 2, "pp": 2, "ep": 2}),
    ("mixtral", {"tp": 2, "etp": 2}),
    ("deepseek_v3", {"dp": 2}),
    ("deepseek_v3", {"tp": 2, "pp": 2, "ep": 2}),
    ("deepseek_v3", {"tp": 2, "etp": 2}),
    ("deepseek_v3", {"ep": 2, "dp": 2}),
]
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(tmp_path_factory.mktemp("families"))


def check(family: str, layout: dict[str, int], one_rank: OneRank, out: Path, **changes: Any) -> None:
    folder, expected = one_rank.of(family)
    check_layout(layout, folder, expected, out, **changes)
    before, after = (load_file(f / "model.safetensors") for f in (folder, out / "trained"))
    biases = [name for name in before if name.endswith(BIAS)]
    assert len(biases) == (3 if family == "deepseek_v3" else 0)
    for name in biases:  # frozen, and float32 whatever the weights are
        assert before[name].any() and torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_one_rank_agrees_with_transformers(family: str, one_rank: OneRank) -> None:
    folder, result = one_rank.of(family)
    check_forward([result], folder, bound=1e-5)
    losses = [metrics["loss"] for metrics in result["metrics"]]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=lambda x: x if isinstance(x, str) else name_of(x))
def test_layout(family: str, layout: dict[str, int], one_rank: OneRank, tmp_path: Path) -> None:
    check(family, layout, one_rank, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"), LONG_LAYOUTS, ids=lambda x: x if isinstance(x, str) else name_of(x)
)
def test_long_layout(family: str, layout: dict[str, int], one_rank: OneRank, tmp_path: Path) -> None:
    check(family, layout, one_rank, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_nothing(recompute: str, one_rank: OneRank, tmp_path: Path) -> None:
    check("deepseek_v3", {"tp": 2, "ep": 2}, one_rank, tmp_path, recompute=recompute)


@pytest.mark.slow
def test_off_loading_brings_the_biases_back(one_rank: OneRank) -> None:
    folder, _ = one_rank.of("deepseek_v3")
    for result in run_ranks(scenarios.offload_and_reload, 2, str(folder), {"tp": 2, "ep": 2}, "float32"):
        assert result["gone"] == 0 and result["same"]


@pytest.mark.slow
def test_a_reference_from_another_folder_has_its_own_biases(one_rank: OneRank, tmp_path: Path) -> None:
    folder, _ = one_rank.of("deepseek_v3")
    other = write_model(tmp_path / "other", "deepseek_v3", seed=7)
    (result,) = run_ranks(scenarios.reference_of, 1, str(folder), {}, str(other))
    batch = random_batch(10, seed=1)
    for role, path in (("reference", other), ("policy", folder)):
        expected, _ = reference_logprobs(path, batch)
        np.testing.assert_allclose(result[role]["logprobs"], expected, atol=1e-5)


@pytest.mark.slow
def test_whole_queries_plain_rotary_embedding_and_uneven_stages(tmp_path: Path) -> None:
    """The forms of the smaller models: no query compression, no YaRN, no limit on groups; three layers on two stages."""
    folder = write_model(
        tmp_path / "small", "deepseek_v3", q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=1,
        num_hidden_layers=3, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    layout = {"tp": 2, "pp": 2, "ep": 2}
    results = run_ranks(scenarios.forward_update_export, 4, str(folder), layout, str(tmp_path), {})
    check_forward(results, folder, bound=1e-5)
    original, loaded = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "loaded"))
    assert original.keys() == loaded.keys()
    assert all(torch.equal(original[name], loaded[name]) for name in original)


def test_bfloat16_keeps_the_biases_in_float32(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "half", "deepseek_v3", dtype=torch.bfloat16)
    changes = {"dtype": "bfloat16"}
    run_ranks(scenarios.forward_update_export, 2, str(folder), {"tp": 2, "ep": 2}, str(tmp_path), changes)
    original = load_file(folder / "model.safetensors")
    for name in ("loaded", "trained"):
        exported = load_file(tmp_path / name / "model.safetensors")
        assert exported.keys() == original.keys()
        for key, tensor in original.items():
            assert exported[key].dtype == tensor.dtype == (torch.float32 if BIAS in key else torch.bfloat16)
            if name == "loaded" or BIAS in key:
                assert torch.equal(exported[key], tensor), key


def test_a_resumed_run_has_the_biases_of_its_checkpoint(tmp_path: Path) -> None:
    """The fresh worker starts from another folder, in another layout: all it has afterwards is the checkpoint's."""
    folder, other = (write_model(tmp_path / str(n), "deepseek_v3", seed=n) for n in range(2))
    layout = {"tp": 2, "ep": 2}
    saved = run_ranks(scenarios.save_then_go_on, 2, str(folder), layout, str(tmp_path), "float32")
    path, out = tmp_path / "step-00000002", tmp_path / "resumed"
    resumed = run_ranks(scenarios.resume_and_go_on, 2, str(other), {"pp": 2}, str(path), str(out), "float32")
    for ours, theirs in zip(resumed[0]["metrics"], saved[0]["metrics"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    original, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    biases = [name for name in original if name.endswith(BIAS)]
    assert biases and all(torch.equal(original[name], after[name]) for name in biases)


def test_prediction_layers_of_a_folder_are_left_out_and_said_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mtp", "deepseek_v3", num_hidden_layers=2, num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    extra = {
        "model.layers.2.eh_proj.weight": torch.zeros(48, 96),
        "model.layers.2.enorm.weight": torch.ones(48),
    }
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "export"
    said = run_ranks(scenarios.load_and_export, 2, str(folder), {"tp": 2, "ep": 2}, str(out))
    assert said == [[f"{folder}: 2 tensors under model.layers.2. are not trained"], []]
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
