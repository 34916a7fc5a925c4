"""The random model of a configuration: every row of its embedding is alive."""

import json
from pathlib import Path

from safetensors.torch import load_file

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.prepare import new_model


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
