"""Models named as on the Hugging Face hub, without a network: what is a name, the cache, and what to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from mrl.capacity.model_facts import find_facts
from mrl.config.sections.model import ModelSection
from mrl.data.hub_models import TOKENIZER_FILES, is_hub_name, model_folder
from mrl.data.tokenise import load_tokenizer_for
from mrl.errors import ConfigError
from mrl.training.hf.hf_folder import read_config
from tests.mrl.data.conftest import make_tokenizer
from tests.support.hub_cache import add_model, use_cache
from tests.tiny_models import write_model

NAME = "me/Sums-0.1B"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "model")
    make_tokenizer().save_pretrained(str(folder))
    return add_model(use_cache(monkeypatch, tmp_path / "home"), NAME, folder)


@pytest.mark.parametrize(
    ("path", "is_name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", True),
        ("hf://Qwen/Qwen2.5-0.5B-Instruct", True),
        ("here/model", False),
        ("hf://here/model", True),
        ("here/link", False),
        ("model", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./model", False),
        ("../model", False),
        ("~/model", False),
        ("a/", False),
        ("hf://model", False),
        ("", False),
    ],
)
def test_a_name_has_one_slash_and_is_no_path_of_this_machine(
    path: str, is_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/model").mkdir(parents=True)
    (tmp_path / "here/link").symlink_to("nowhere")
    assert is_hub_name(path) is is_name


@pytest.mark.parametrize("path", [NAME, f"hf://{NAME}"])
def test_a_model_in_the_cache_needs_no_network(path: str, snapshot: Path) -> None:
    assert model_folder(path, "model.path") == str(snapshot)
    assert load_tokenizer_for(ModelSection(path=path)).encode("1+1")
    assert find_facts(ModelSection(path=path)).origin == f"{snapshot}/config.json"


def test_any_other_path_stays(snapshot: Path) -> None:
    assert model_folder("/nowhere/model", "model.path") == "/nowhere/model"
    assert model_folder(str(snapshot), "model.path") == str(snapshot)


def test_a_missing_model_says_what_to_run(snapshot: Path) -> None:
    with pytest.raises(ConfigError) as error:
        model_folder("me/other", "critic.path")
    (line,) = str(error.value).splitlines()
    assert line.startswith(
        "critic.path = me/other does not exist, and the hub's cache has no model of this name"
    )
    assert "run `hf download me/other` on a machine with a network (or set HF_HUB_OFFLINE=0 here)" in line


def test_with_a_network_only_the_needed_files_are_downloaded(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        if name != NAME:
            raise huggingface_hub.errors.LocalEntryNotFoundError("404: no such repository\nRequest ID: 7")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    load_tokenizer_for(ModelSection(path=f"hf://{NAME}"))
    assert calls == [(NAME, {"allow_patterns": [*TOKENIZER_FILES], "local_files_only": False})]
    model_folder(NAME, "model.path", download=False)
    assert calls[1][1]["local_files_only"] and "*.safetensors" in calls[1][1]["allow_patterns"]
    with pytest.raises(ConfigError, match=r"\(404: no such repository\); .* with a network and copy"):
        model_folder("me/other", "model.path")


def test_a_node_without_the_snapshot_is_named_with_what_to_run(snapshot: Path) -> None:
    assert read_config(snapshot) == json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").unlink()
    with pytest.raises(ConfigError, match=rf"does not exist on .*; run `hf download {NAME}` on each node"):
        read_config(snapshot)
