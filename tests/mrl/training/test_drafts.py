"""A draft head is trained beside the policy: as plain torch computes, and changing nothing of the policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.mrl.training import draft_scenarios, scenarios
from tests.ranks import run_ranks
from tests.support.draft_folders import ReferenceDraft, add_drafts
from tests.support.transformer_engine import FOLDER
from tests.tiny_models import random_batch, write_model

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a tiny model with a draft head of each family."""
    folder = tmp_path_factory.mktemp("models")
    result = {family: write_model(folder / family, family) for family in ("glm4_moe", "deepseek_v3")}
    for path in result.values():
        add_drafts(path)
    return result


def draft_loss(folder: Path, scratch: Path) -> torch.Tensor:
    """Return the loss of the trained tokens of scenarios.train() by transformers."""
    batch = random_batch(10, seed=1)
    logprobs = ReferenceDraft(folder, scratch).logprobs(batch, temperature=scenarios.TEMPERATURE)
    return -logprobs[torch.from_numpy(batch.loss_mask)].sum() / int(batch.loss_mask.sum())


LAYOUTS = {
    "one": ("glm4_moe", {}, ""),
    "tp2-ep2": ("glm4_moe", {"tp": 2, "ep": 2}, ""),
    "pp2": ("glm4_moe", {"pp": 2}, ""),
    "dp2-ep2": ("deepseek_v3", {"dp": 2, "ep": 2}, ""),
    "cp2": ("glm4_moe", {"cp": 2}, ""),
    "engine-tp2": ("deepseek_v3", {"tp": 2}, "transformer_engine"),
}
"""Family, layout and layers; Transformer Engine's fold norms into projections."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_plain_torch_computes(name, folders, tmp_path) -> None:
    """Each update's loss is transformers' of the folder exported before it."""
    family, layout, spec = LAYOUTS[name]
    ranks = run_ranks(
        draft_scenarios.train_and_export,
        2 if layout else 1,
        str(folders[family]),
        layout,
        str(tmp_path),
        {"spec": spec} if spec else {},
        stand_ins=FOLDER if spec else None,
    )
    original = load_file(folders[family] / "model.safetensors")
    loaded = load_file(tmp_path / "0" / "model.safetensors")
    assert loaded.keys() == original.keys()
    assert all(torch.equal(loaded[name], value) for name, value in original.items())
    metrics = ranks[-1]
    for step, values in enumerate(metrics):
        expected = float(draft_loss(tmp_path / str(step), tmp_path / f"deeper-{step}"))
        assert values["draft/loss"] == pytest.approx(expected, abs=2e-5)
        assert 0 < values["draft/overlap"] < 1
    assert metrics[1]["draft/loss"] < metrics[0]["draft/loss"] - 0.01


def test_the_policy_is_the_same_to_the_bit_and_gradients_are_torchs(folders, tmp_path) -> None:
    """Also with clipping, which takes the norms of policy and draft head apart."""
    folder = folders["glm4_moe"]
    (frozen,), (trained,) = (
        run_ranks(draft_scenarios.gradients, 1, str(folder), drafts) for drafts in ("frozen", "trained")
    )
    assert len(frozen) > 80
    assert all(torch.equal(trained[name], value) for name, value in frozen.items())
    head = ReferenceDraft(folder, tmp_path / "deeper")
    batch = random_batch(10, seed=1)
    logprobs = head.logprobs(batch, temperature=scenarios.TEMPERATURE)
    (-logprobs[torch.from_numpy(batch.loss_mask)].sum() / int(batch.loss_mask.sum())).backward()
    expected = {
        "embedding_norm.weight": head.enorm,
        "hidden_norm.weight": head.hnorm,
        "projection.weight": head.eh_proj,
        "final_norm.weight": head.norm,
        "layer.self_attention.linear_proj.weight": head.layer.self_attn.o_proj.weight,
        "layer.mlp.router.weight": head.layer.mlp.gate.weight,
    }
    for name, parameter in expected.items():
        ours, theirs = trained[f"gradient of drafts.{name}"], parameter.grad
        assert theirs is not None and float(theirs.abs().max()) > 1e-4, name
        assert torch.allclose(ours, theirs, atol=2e-6, rtol=1e-4), (name, (ours - theirs).abs().max())
    drafts = sorted(trained.keys() - frozen.keys())
    assert all(float(trained[name].abs().max()) > 0 for name in drafts if name.startswith("gradient"))


def test_a_draft_head_is_resumed_in_another_layout(folders, tmp_path) -> None:
    folder, path = folders["deepseek_v3"], str(tmp_path / "step-00000001")
    layouts = {"tp": 2, "ep": 2}, {"pp": 2}
    saved, resumed = (
        run_ranks(draft_scenarios.save_and_resume, 2, str(folder), layout, path, number == 0)[-1]
        for number, layout in enumerate(layouts)
    )
    assert resumed[0]["draft/loss"] == pytest.approx(saved[0]["draft/loss"], abs=2e-5)
