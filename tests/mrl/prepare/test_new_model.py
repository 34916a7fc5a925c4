"""The random model of a configuration: every row of its embedding is alive."""

import json
from pathlib import Path
from typing import get_args

import pytest
from safetensors.torch import load_file

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.models.families import family_of, require_trainable
from mrl.prepare import new_model
from mrl.training.hf.hf_folder import check_folder, read_config


def test_no_embedding_row_is_zero_and_the_padding_token_is_known(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    new = NewModelSection(
        hidden_size=32, num_heads=1, num_kv_heads=1, head_dim=32, expert_size=32, num_layers=1
    )
    new_model.ensure(ModelSection(path=str(tmp_path / "model"), new=new, max_length=8), [str(rows)], seed=0)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "model" / name).read_text())["pad_token_id"] == 0
    embedding = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"]
    assert embedding.float().norm(dim=1).min() > 0.05


@pytest.mark.parametrize("family", get_args(NewModelSection.model_fields["family"].annotation))
def test_every_family_that_can_be_asked_for_is_made_and_trains(family: str, tmp_path: Path) -> None:
    """Its folder asks for nothing that training does not implement, and has the tensors of the family's tables."""
    new = NewModelSection.model_validate({
        "family": family, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "expert_size": 32, "num_layers": 2,
    })  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    folder = tmp_path / "model"
    new_model.ensure(ModelSection(path=str(folder), new=new, max_length=64), [str(rows)], seed=0)
    hf = read_config(folder)
    require_trainable(hf)
    files, left_out = check_folder(folder, family_of(hf), hf)
    assert files and not left_out
