"""The card of an exported folder: valid front matter without anything unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, metadata_load

from mrl.config.load import load
from mrl.config.root import Config
from mrl.observe.model_card import model_card

ROOT = Path(__file__).parents[3]
ROW = {"step": 8, "val/accuracy": 0.75, "val/avg@4": 0.5, "val/prompts": 64.0, "reward/mean": 0.3}


def config_of(path: Path, *words: str) -> Config:
    return load([ROOT / "configs/quickstart.yaml"], ["run.name=sums", f"model.path={path}", *words])


def card_of(config: Config, row: dict[str, Any] | None = ROW) -> ModelCard:
    return ModelCard(model_card(config, step=10, dtype="bfloat16", versions={"torch": "2.13.0"}, row=row))


def test_a_cached_base_is_named_and_keeps_its_license(tmp_path: Path) -> None:
    base = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de"
    base.mkdir(parents=True)
    (base / "README.md").write_text(
        "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\nlibrary_name: x\n---\n# Base\n"
    )
    card = card_of(config_of(base))
    data = card.data.to_dict()
    assert data["base_model"] == "Qwen/Qwen3-0.6B"
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "qwen", "LICENSE")
    assert data["library_name"] == "transformers" and "reinforcement-learning" in data["tags"]


@pytest.mark.parametrize("readme", [None, "# no front matter", "---\n[\n---\n", "---\n- a list\n---\n"])
def test_what_is_not_known_is_left_out(readme: str | None, tmp_path: Path) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    card = card_of(config_of(tmp_path, "data.train=/home/someone/rows.jsonl"), row=None)
    assert not {"base_model", "license", "datasets"} & card.data.to_dict().keys()
    assert "`rows.jsonl`" in card.text and "/home/someone" not in card.content
    assert "no validation" in card.text


def test_the_card_tells_run_and_validation(tmp_path: Path) -> None:
    card = card_of(config_of(tmp_path, "data.train=hf://openai/gsm8k:main@train"))
    (tmp_path / "README.md").write_text(card.content)
    assert metadata_load(tmp_path / "README.md") == card.data.to_dict()
    assert card.data.to_dict()["datasets"] == ["openai/gsm8k"]
    for words in ("# sums, step 10", "torch 2.13.0", "estimator `grpo`", "| val/accuracy | 0.7500 |"):
        assert words in card.text
    assert "Validation at step 8, on 64 prompts" in card.text and "reward/mean" not in card.text
