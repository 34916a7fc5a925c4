"""Exports have their source's draft heads, or say in the log and in config.json that they have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.config.sections.training import TrainingSection
from mrl.errors import CheckpointError, ConfigError
from mrl.models.families import family_of
from mrl.models.family import DRAFTS, require_draft_head
from mrl.models.layout import Layout
from mrl.training.checkpoint.compatible import require_compatible
from mrl.training.hf import export_folder, hf_folder, read_values
from tests.published import publish
from tests.support.checkpoints import write_checkpoint
from tests.support.draft_folders import add_drafts
from tests.tiny_models import write_model


def export(checkpoint: Path, out: Path, source: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Export a checkpoint; return the written tensors."""
    options = {"dtype": "float32"} | options
    export_folder.export_checkpoint(checkpoint, out, source=source, **options)
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


def test_a_float8_draft_head_is_loaded_dequantised(tmp_path: Path) -> None:
    source, one = write_model(tmp_path / "source", "deepseek_v3", dtype=torch.bfloat16), Layout()
    add_drafts(source)
    publish(source, tmp_path / "published", tmp_path / "wide")
    hf = hf_folder.read_config(source)
    tensors = family_of(hf).local_tensors(hf, one, one.coordinates(0), drafts=True)
    loaded = []
    for folder in ("published", "wide"):
        hf_folder.check_folder(tmp_path / folder, family_of(hf), hf, drafts=True)
        drafts = [tensor for tensor in tensors if tensor.name.startswith(DRAFTS)]
        targets = [(tensor, torch.full(tensor.shape, torch.nan, dtype=torch.bfloat16)) for tensor in drafts]
        read_values.load_folder(tmp_path / folder, family_of(hf), hf, targets, drafts=True)
        loaded.append([values for _, values in targets])
    assert len(loaded[0]) > 12
    assert all(torch.equal(*pair) for pair in zip(*loaded, strict=True))


def test_a_missing_tensor_of_a_trained_draft_head_is_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "glm4_moe")
    name = next(name for name in add_drafts(source) if name.endswith("eh_proj.weight"))
    weights = load_file(source / "model.safetensors")
    del weights[name]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    hf = hf_folder.read_config(source)
    hf_folder.check_folder(source, family_of(hf), hf)
    with pytest.raises(ConfigError, match=rf"lacks 1 of .*{name}"):
        hf_folder.check_folder(source, family_of(hf), hf, drafts=True)


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


def test_a_draft_head_is_trained_only_where_that_is_implemented() -> None:
    """Faults name the other setting, or the family."""
    drafts: dict[str, Any] = {"drafts": "trained"}
    others: tuple[dict[str, Any], ...] = (
        {"lora": {"rank": 2}},
        {"router_aux_loss": 0.1},
        {"share_prefixes": True},
    )
    for other in others:
        (name,) = other
        with pytest.raises(ValueError, match=f"training.drafts = trained with training.{name}"):
            TrainingSection(**drafts, **other)
    assert not TrainingSection(**drafts).may_share_prefixes(delta_nets=0)
    one = {"num_nextn_predict_layers": 1}
    for changes, message in (
        ({"model_type": "qwen3_next"}, "not implemented for qwen3_next"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true"),
    ):
        hf = {"model_type": "glm4_moe"} | one | changes
        with pytest.raises(ConfigError, match=message):
            require_draft_head(family_of(hf), hf)
    require_draft_head(family_of(hf := {"model_type": "glm4_moe"} | one), hf)


def test_a_checkpoint_resumes_with_the_setting_it_was_saved_with(tmp_path: Path) -> None:
    about = {"model_type": "glm4_moe", "dtype": "float32"}
    trained = about | {"drafts": "trained"}
    require_compatible(tmp_path, trained, trained, [])
    for saved, current in ((about, trained), (trained, about)):
        with pytest.raises(CheckpointError, match=r"training\.drafts = (frozen|trained), but this run has"):
            require_compatible(tmp_path, saved, current, [])
