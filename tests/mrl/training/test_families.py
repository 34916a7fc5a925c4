"""DeepSeek-V3 and gpt-oss on the worker: attention forms, biases, sinks, and draft heads that are carried."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.training.hf import export_folder
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import CORRECTION
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, reference_logprobs, write_model

pytestmark = pytest.mark.integration


def test_bfloat16_keeps_the_biases_in_float32(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "half", "deepseek_v3", dtype=torch.bfloat16)
    changes = {"dtype": "bfloat16"}
    run_ranks(scenarios.forward_update_export, 2, str(folder), {"tp": 2, "ep": 2}, str(tmp_path), changes)
    original = load_file(folder / "model.safetensors")
    for name in ("loaded", "trained"):
        saved = load_file(tmp_path / name / "model.safetensors")
        assert saved.keys() == original.keys()
        for key, tensor in original.items():
            assert (
                saved[key].dtype == tensor.dtype == (torch.float32 if CORRECTION in key else torch.bfloat16)
            )
            if name == "loaded" or CORRECTION in key:
                assert torch.equal(saved[key], tensor), key


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_biases_and_sinks_are_resumed_in_another_layout(family: str, tmp_path: Path) -> None:
    """Resume them with their moments, and export them; the fresh worker starts from another folder."""
    folder, other = (write_model(tmp_path / str(n), family, seed=n) for n in range(2))
    layout = {"tp": 2, "ep": 2}
    saved = run_ranks(scenarios.save_then_go_on, 2, str(folder), layout, str(tmp_path), "float32")
    path, out = tmp_path / "step-00000002", tmp_path / "resumed"
    export_folder.export_checkpoint(path, tmp_path / "one-process", source=folder, dtype="float32")
    one_process = scenarios.digests_of_folder(tmp_path / "one-process", layout, dtype="float32")
    assert one_process == [rank["digest"] for rank in saved]
    resuming = str(folder), {"pp": 2}, str(path), str(out), "float32", "auto", str(other)
    resumed = run_ranks(scenarios.resume_and_go_on, 2, *resuming)
    for ours, theirs in zip(resumed[0]["metrics"], saved[0]["metrics"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    original, after = (load_file(f / "model.safetensors") for f in (folder, out))
    corrections = [name for name in original if name.endswith(CORRECTION)]
    assert len(corrections) == (3 if family == "deepseek_v3" else 0)
    assert all(torch.equal(original[name], after[name]) for name in corrections)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_draft_heads_of_a_folder_are_carried_and_said_once(family: str, tmp_path: Path) -> None:
    """They are named like a layer after the last; the last layer, final norm and head are still exported."""
    folder = write_model(tmp_path / "mtp", family, num_hidden_layers=2, num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    extra = {
        "model.layers.2.eh_proj.weight": torch.zeros(48, 96),
        "model.layers.2.enorm.weight": torch.ones(48),
    }
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "export"
    warnings = run_ranks(scenarios.load_and_export, 2, str(folder), {"tp": 2, "ep": 2}, str(out))
    assert warnings == [[f"{folder}: 2 tensors under model.layers.2. are not trained"], []]
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == (tensors | extra).keys() >= {"lm_head.weight", "model.norm.weight"}
    assert all(torch.equal(exported[name], value) for name, value in (tensors | extra).items())
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3_next", "qwen3_5_moe"))]
)
def test_delta_nets_in_bfloat16_are_no_further_off_than_transformers(family: str, tmp_path: Path) -> None:
    """Compare the errors of both with transformers' float32 log-probs of the same weights."""
    folder, batch = write_model(tmp_path / family, family, dtype=torch.bfloat16), random_batch(24, longest=60)
    exact, theirs = (reference_logprobs(folder, batch, dtype=d)[0] for d in (torch.float32, torch.bfloat16))
    (ours,) = run_ranks(scenarios.logprobs_of, 1, str(folder), "bfloat16", batch)
    errors = [np.sqrt(np.mean((logprobs - exact) ** 2)) for logprobs in (ours, theirs)]
    assert errors[0] < 1.5 * errors[1], errors
