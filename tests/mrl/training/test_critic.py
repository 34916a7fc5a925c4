"""The critic on real ranks: values and gradients of plain torch, equal layouts, and its checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.config.sections.training import LayoutSection
from mrl.training.hf import export_folder
from mrl.training.loaded_model import HEAD
from tests.mrl.training import critics
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

NAMES = {
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.layers.1.mlp.router.weight": "layers.1.mlp.gate.weight",
}
"""Megatron's and transformers' names of some parameters all over the backbone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "moe")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, Any]:
    return run_ranks(critics.values_and_updates, 1, str(folder), {})[0]


def reference(folder: Path) -> tuple[np.ndarray, float, dict[str, torch.Tensor]]:
    """Return values [N], loss and gradients from transformers' backbone and a matrix-vector product."""
    import transformers

    backbone = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    head = critics.head_weight().requires_grad_()
    batch, values = critics.batch_with_returns(), []
    for start, end in itertools.pairwise(batch.cu_seqlens):
        states = backbone(torch.from_numpy(batch.tokens[start:end])[None]).last_hidden_state[0]
        values += [torch.zeros(1), states[:-1] @ head[0]]
    flat, mask = torch.cat(values), torch.from_numpy(batch.loss_mask)
    errors = (flat - torch.from_numpy(batch.arrays["returns"]))[mask]
    loss = errors.square().mean() / 2
    loss.backward()
    parameters = dict(backbone.named_parameters())
    gradients = {ours: parameters[theirs].grad for ours, theirs in NAMES.items()}
    return flat.detach().numpy(), loss.item(), gradients | {HEAD: head.grad}  # type: ignore[dict-item]


def test_values_loss_and_gradients_are_those_of_plain_torch(folder: Path, one_rank: dict[str, Any]) -> None:
    values, loss, gradients = reference(folder)
    np.testing.assert_allclose(one_rank["before"]["values"], values, atol=1e-5)
    assert np.abs(values).max() > 0.5
    assert one_rank["metrics"][0]["loss"] == pytest.approx(loss, abs=1e-6)
    for name, expected in gradients.items():
        torch.testing.assert_close(one_rank["gradients"][name], expected, atol=1e-5, rtol=1e-3)
    assert one_rank["metrics"][1]["loss"] < one_rank["metrics"][0]["loss"]
    assert one_rank["alone"], "an update of one model changed the other"


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "ep": 2},
        {"pp": 2},
        {"ep": 2, "dp": 2},
        pytest.param({"cp": 2, "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda layout: "-".join(layout),
)
def test_every_layout_computes_the_same(layout, folder, one_rank) -> None:
    results = run_ranks(critics.values_and_updates, LayoutSection(**layout).world_size, str(folder), layout)
    bounds, seen = critics.batch_with_returns().cu_seqlens, []
    for result in results:
        assert result["alone"]
        for ours, theirs in zip(result["metrics"], one_rank["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-5)
        if result["before"] is None:
            continue
        seen += result["samples"].tolist()
        index = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in result["samples"]])
        for moment, bound in {"before": 1e-5, "after": 1e-3}.items():
            expected = one_rank[moment]["values"][index]
            np.testing.assert_allclose(result[moment]["values"], expected, atol=bound)
    assert sorted(seen) == list(range(10))


def test_a_checkpoint_holds_policy_and_critic(folder: Path, tmp_path: Path) -> None:
    for result in run_ranks(critics.save_and_resume, 2, str(folder), {"ep": 2, "dp": 2}, str(tmp_path)):
        assert (result["fresh"]["values"] == 0).all()
        first, again = result["steps"]
        assert first == again and result["same"] and result["extra"] == {"next_step": 2}
        assert "contains no critic" in result["refused"]
    for step in (1, 2):  # with and without a critic beside the same policy
        checkpoint, out = tmp_path / f"step-00000{step}", tmp_path / f"export-{step}"
        export_folder.export_checkpoint(checkpoint, out, source=folder, dtype="float32")
    both, alone = (load_file(tmp_path / f"export-{step}" / "model.safetensors") for step in (1, 2))
    assert both.keys() == alone.keys() and all(torch.equal(both[name], alone[name]) for name in both)
