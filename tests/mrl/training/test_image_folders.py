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
from mrl.training.hf import export_folder, hf_folder
from tests.mrl.training.scenarios import digests_of_folder
from tests.support.checkpoints import write_checkpoint
from tests.support.image_folders import text_alone
from tests.tiny_models import write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as Qwen3.5 with experts is published, with a multi-token prediction layer."""
    folder = write_model(tmp_path_factory.mktemp("source") / "model", "qwen3_5_moe", mtp_num_hidden_layers=1)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(2, 2)}, folder / "model.safetensors")
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
    assert any(".experts.7.up_proj" in name for name in weights) and not any("visual" in n for n in weights)
    save_file(weights, other / "model.safetensors")
    layout = {"tp": 2, "ep": 2}
    ours, theirs = (digests_of_folder(folder, layout, dtype="float32") for folder in (source, other))
    assert ours == theirs and len(set(ours)) == 2


def test_an_export_has_the_sources_form_and_images(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The export is bitwise equal for any file size; config.json omits parts neither trained nor copied."""
    files = export_folder.export_checkpoint(
        checkpoint, tmp_path / "out", source=source, dtype="float32", file_bytes=20_000
    )
    written = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        written |= load_file(path)
    expected = load_file(source / "model.safetensors")
    assert expected.pop("mtp.fc.weight") is not None and len(files.members) > 3
    assert written.keys() == expected.keys() == files.tensors.keys()
    assert all(torch.equal(written[name], values) for name, values in expected.items())
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out"))
    before["text_config"]["mtp_num_hidden_layers"] = 0
    assert after == before
    hf = hf_folder.read_config(tmp_path / "out")
    hf_folder.check_folder(tmp_path / "out", family_of(hf), hf)


def test_images_keep_their_type_in_an_export_of_another(
    source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    export_folder.export_checkpoint(checkpoint, tmp_path / "out", source=source, dtype="bfloat16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in load_file(source / "model.safetensors").items():
        if name.startswith("model.visual."):
            assert torch.equal(written[name], values)
        elif not name.startswith("mtp."):
            assert torch.equal(written[name], values.bfloat16())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


def test_an_export_without_the_images_that_config_promises_is_refused(source, checkpoint, tmp_path) -> None:
    other = shutil.copytree(source, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match=r"has no tensors under model\.visual\."):
        export_folder.export_checkpoint(checkpoint, tmp_path / "out", source=other, dtype="float32")
    assert not (tmp_path / "out").exists()
