"""Folders with an image model and stacked experts: both forms load, and exports keep form and images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.errors import ConfigError
from mrl.models.families import family_of
from mrl.models.folder_format import FolderFormat
from mrl.training.hf import export_folder, hf_folder
from tests.mrl.training.layouts import CORRECTION
from tests.mrl.training.scenarios import digests_of_folder
from tests.support.checkpoints import write_checkpoint
from tests.support.image_folders import IMAGE_MODELS, text_alone
from tests.tiny_models import write_model

PREDICTION = "mtp.layers.0.mlp.experts.gate_up_proj"
"""A tensor of Qwen3.5's and Qwen3.6's multi-token prediction, whose experts are packed."""


@pytest.fixture(scope="module", params=["qwen3_5_moe", "qwen3_vl_moe", "mistral3", "kimi_k25"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as each family publishes it; Qwen3.5's has a multi-token prediction layer."""
    predicts = request.param == "qwen3_5_moe"
    changes = {"mtp_num_hidden_layers": 1} if predicts else {}
    folder = write_model(tmp_path_factory.mktemp("source") / "model", request.param, **changes)
    weights = load_file(folder / "model.safetensors")
    draft = {PREDICTION: torch.ones(2, 2, 2)} if predicts else {}
    save_file(weights | draft, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"  # which published folders say there too
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, source)
    return path


def test_both_forms_of_a_folder_are_read_alike(source: Path, tmp_path: Path) -> None:
    """Load the published form, and transformers' text form with other names and separate experts."""
    other = shutil.copytree(source, tmp_path / "text")
    weights = text_alone(load_file(source / "model.safetensors"))
    assert not any(name.startswith(IMAGE_MODELS) for name in weights)
    has_experts = any(".experts.7.up_proj" in name for name in weights)
    save_file(weights, other / "model.safetensors")
    layout = {"tp": 2, "ep": 2} if has_experts else {"tp": 2}
    ours, theirs = (digests_of_folder(folder, layout, dtype="float32") for folder in (source, other))
    assert ours == theirs and len(set(ours)) == 2


def test_packed_prediction_experts_do_not_pack_the_others() -> None:
    """Qwen3.6's float8 folders have each expert by itself."""
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    form = FolderFormat.of(["model.language_model.layers.0.mlp.experts.3.up_proj.weight", PREDICTION])
    assert form.name(name) == "model.language_model.layers.0.mlp.experts.3.up_proj.weight"


def test_an_export_has_the_sources_form_and_images(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The export is bitwise equal for any file size, with the draft head."""
    files = export_folder.export_checkpoint(
        checkpoint, tmp_path / "out", source=source, dtype="float32", file_bytes=20_000
    )
    written = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        written |= load_file(path)
    expected = load_file(source / "model.safetensors")
    assert len(files.members) > 3
    assert written.keys() == expected.keys() == files.tensors.keys()
    assert all(torch.equal(written[name], values) for name, values in expected.items())
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out"))
    if "num_nextn_predict_layers" in before["text_config"]:  # Kimi's, whose folder has no draft head
        before["text_config"]["num_nextn_predict_layers"] = 0
    assert after == before
    hf = hf_folder.read_config(tmp_path / "out")
    hf_folder.check_folder(tmp_path / "out", family_of(hf), hf)


def test_images_keep_their_type_in_an_export_of_another(
    source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    export_folder.export_checkpoint(checkpoint, tmp_path / "out", source=source, dtype="bfloat16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in load_file(source / "model.safetensors").items():
        if name.startswith(IMAGE_MODELS) or name.endswith(CORRECTION) or name.startswith("mtp."):
            assert torch.equal(written[name], values)
        else:
            assert torch.equal(written[name], values.bfloat16())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


def test_an_export_without_the_images_that_config_promises_is_refused(source, checkpoint, tmp_path) -> None:
    other = shutil.copytree(source, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match=r"has no tensors under (model\.visual|vision_tower)\."):
        export_folder.export_checkpoint(checkpoint, tmp_path / "out", source=other, dtype="float32")
    assert not (tmp_path / "out").exists()
