"""Exports have their source's draft heads, or say in the log and in config.json that they have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.models.families import family_of
from mrl.training.hf import export_folder, hf_folder
from tests.published import publish
from tests.support.checkpoints import write_checkpoint
from tests.support.draft_folders import add_drafts
from tests.tiny_models import write_model


def export(checkpoint: Path, out: Path, source: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Export a checkpoint; return the written tensors."""
    export_folder.export_checkpoint(checkpoint, out, source=source, **({"dtype": "float32"} | options))
    hf = hf_folder.read_config(out)
    files, _ = hf_folder.check_folder(out, family_of(hf), hf)
    return {name: load_file(path)[name] for name, path in files.items()}


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3", "qwen3_next"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a source with a draft head, and a checkpoint of other weights."""
    folder = tmp_path_factory.mktemp("models")
    source, other = (write_model(folder / str(seed), request.param, seed=seed) for seed in range(2))
    write_checkpoint(folder / "checkpoint", other)
    add_drafts(source)
    return source, folder / "checkpoint"


def test_an_export_has_the_draft_head_of_its_source(
    trained: tuple[Path, Path], tmp_path: Path, caplog
) -> None:
    """Its copies of embedding and output layer are those of the export."""
    source, checkpoint = trained
    before = load_file(source / "model.safetensors")
    written = export(checkpoint, tmp_path / "out", source, file_bytes=20_000)
    assert written.keys() == before.keys()
    (prefix,) = family_of(hf := hf_folder.read_config(source)).draft_prefixes(hf)
    copies = {f"{prefix}embed_tokens.weight": "model.embed_tokens.weight"}
    copies |= {f"{prefix}shared_head.head.weight": "lm_head.weight"}
    drafts = [name for name in written if name.startswith(prefix)]
    assert len(drafts) > 12
    for name in drafts:
        assert torch.equal(written[name], written[copies[name]] if name in copies else before[name]), name
    assert not torch.equal(written["lm_head.weight"], before["lm_head.weight"])
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert not caplog.records


def test_a_float8_draft_head_is_exported_dequantised(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "glm4_moe", dtype=torch.bfloat16)
    write_checkpoint(tmp_path / "checkpoint", source)
    drafts = add_drafts(source)
    publish(source, tmp_path / "published", tmp_path / "wide")
    written = export(tmp_path / "checkpoint", tmp_path / "out", tmp_path / "published", dtype="bfloat16")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert written.keys() == wide.keys() >= drafts.keys()
    assert all(torch.equal(written[name], wide[name]) for name in drafts)
    assert any(not torch.equal(wide[name], drafts[name]) for name in drafts)


@pytest.mark.parametrize("case", ["absent", "int4", "reward model"])
def test_an_export_without_the_draft_head_says_why(case: str, tmp_path: Path, caplog) -> None:
    source = write_model(tmp_path / "source", "glm4_moe")
    write_checkpoint(tmp_path / "checkpoint", source)
    weights = load_file(source / "model.safetensors")
    drafts = add_drafts(source)
    if case != "reward model":
        stored = {} if case == "absent" else {f"{name}_packed": value for name, value in drafts.items()}
        save_file(weights | stored, source / "model.safetensors", metadata={"format": "pt"})
    if case == "reward model":
        hf = hf_folder.read_config(source) | {"architectures": ["Glm4MoeForSequenceClassification"]}
        files = export_folder.plan_files(source, hf, dtype="float32")
        assert files.no_drafts == "a reward model has none"
        assert not files.tensors.keys() & drafts.keys() and not files.carried
        return
    written = export(tmp_path / "checkpoint", tmp_path / "out", source)
    assert written.keys() == weights.keys()
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    reason = {"absent": "its files have none", "int4": "the source has them in int4"}[case]
    assert f"{source}: exported without draft heads: " in caplog.text and reason in caplog.text
