"""Recipes of pretrained models on one GPU: the plan, the checks of a run, the reward of typical responses."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrl.capacity.hardware import load_hardware
from mrl.capacity.report import CapacityReport, capacity_report
from mrl.config.load import dump, load
from mrl.config.root import Config
from mrl.config.sections.data import DataEntry
from mrl.files import CONFIGS
from mrl.launch.commands import check
from mrl.rewards.maths.maths_verifier import verify_exactly
from tests.support import chat_tokenizers
from tests.support.recipes import ONE_GPU, files_of, one_gpu_cases
from tests.support.source_tree import ROOT

ROWS = {
    "hf://openai/gsm8k:main@train": ROOT / "tests/data/gsm8k/train.jsonl",
    "hf://openai/gsm8k:main@test": ROOT / "tests/data/gsm8k/test.jsonl",
}
"""Data sets of the recipes -> files with their first rows."""
TOKENIZERS = {"qwen2": chat_tokenizers.qwen, "llama": chat_tokenizers.llama}
"""Model type -> small tokenizer with the family's roles."""
IDS = [f"{files[-1].stem}, {hardware}" for files, hardware in one_gpu_cases()]


def plan(files: tuple[Path, ...], hardware: str, *words: str) -> CapacityReport:
    return capacity_report(load(files, words), load_hardware(hardware))


@pytest.mark.parametrize(("files", "hardware"), one_gpu_cases(), ids=IDS)
def test_a_recipe_fits_its_gpu_without_a_warning(files, hardware) -> None:
    report = plan(files, hardware)
    assert (report.advice.errors, report.advice.warnings) == ([], [])
    assert report.fits
    assert report.estimate.layout.world_size == report.estimate.hardware.gpus_per_node == 1
    assert max(wait.share for wait in report.estimate.waits) < 0.5


@pytest.mark.parametrize("name", ONE_GPU)
def test_a_recipe_alone_does_not_fit_24_gb(name: str) -> None:
    assert not plan(files_of(name), "1x24gb").fits


def test_the_larger_model_needs_adapters_on_24_gb() -> None:
    """docs/recipes.md has the command."""
    layout = CONFIGS / "layouts/qwen2_5_0_5b_1x1x24gb.yaml"
    files = (*files_of("llama_3_2_1b"), layout)
    assert not plan(files, "1x24gb").fits
    assert plan(files, "1x24gb", "training.lora={rank: 32}").fits


def on_shapes(name: str, folder: Path) -> Config:
    """Return the recipe with a model of config.json and a small tokenizer, and the files of `ROWS`."""
    config = load(files_of(name))
    shapes = CONFIGS / "models" / Path(config.model.path).name / "config.json"
    TOKENIZERS[json.loads(shapes.read_text())["model_type"]]().save_pretrained(folder)
    shutil.copy(shapes, folder)

    def local(entries: tuple[DataEntry, ...]) -> tuple[DataEntry, ...]:
        return tuple(entry.model_copy(update={"path": str(ROWS[entry.paths[0]])}) for entry in entries)

    data = {
        "train": local(config.data.train_entries()),
        "validation": local(config.data.validation_entries()),
    }
    lengths: dict[str, Any] = {
        "max_prompt_tokens": 4096
    }  # the small tokenizer needs about a token per letter
    changes = {
        "model": config.model.model_copy(update={"path": str(folder), "max_length": 8192}),
        "data": config.data.model_copy(update=data | lengths),
        "loop": config.loop.model_copy(update={"prompts_per_step": 64}),  # the file has no more rows
    }
    return config.model_copy(update=changes)


@pytest.mark.parametrize("name", ONE_GPU)
def test_a_recipe_passes_the_checks_of_a_run(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a cluster with GPUs")
    monkeypatch.setattr(check, "_check_weights", lambda folder, policy, drafts=False: None)
    inputs = check.check_run(on_shapes(name, tmp_path))
    assert inputs.warnings == ()
    (source,) = inputs.dataset.train
    assert len(source.rows) == 64
    system, question = source.rows[0].messages
    assert (system["role"], question["role"]) == ("system", "user")
    assert r"\boxed{}" in system["content"] and system["content"] in source.rows[0].text
    validated = inputs.dataset.validation_prompts(1)[0]
    assert validated.messages[0] == system


@pytest.mark.parametrize("name", ONE_GPU)
@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"She makes 9 * $2 = $18 a day. \[ \boxed{18} \]", 1.0),
        (r"Therefore, the final answer is: $\boxed{\$18}$. I hope it is correct.", 1.0),
        (r"\boxed{18 \text{ dollars}}", 1.0),
        (r"16 - 3 - 4 = \boxed{9} eggs, and 9 * 2 = \boxed{18.00}", 1.0),
        ("9 * 2 = 18\n#### 18", 1.0),
        ("**Answer:** 18 dollars", 1.0),
        (r"\boxed{18} eggs, so \boxed{9}", 0.0),
        ("She makes 18 dollars a day.", 0.0),
        (r"\boxed{}", 0.0),
    ],
)
def test_the_reward_finds_the_answers_of_instruct_models(name: str, response: str, value: float) -> None:
    reward = load(files_of(name)).reward
    verdict = verify_exactly(response, "18", reward.maths)
    assert verdict is not None and verdict.value == value, verdict


@pytest.mark.parametrize("name", ONE_GPU)
def test_the_longest_response_fits_after_the_longest_prompt(name: str) -> None:
    config = load(files_of(name))
    assert config.model.max_length == config.data.max_prompt_tokens + config.rollout.max_response_tokens


@pytest.mark.parametrize(("files", "hardware"), one_gpu_cases(), ids=IDS)
def test_a_resolved_recipe_reads_back_the_same(files, hardware, tmp_path: Path) -> None:
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(load(files)))
    assert dump(load([resolved])) == resolved.read_text()


@pytest.mark.parametrize("name", ONE_GPU)
def test_the_head_and_the_page_have_the_commands(name: str) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()
    (planned,) = re.findall(r"mrl plan +(\S+) --hardware (\S+)", text)
    assert planned == (f"configs/{name}.yaml", ONE_GPU[name])
    download = f"hf download {load(files_of(name)).model.path}"
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert download in text and download in page
    assert f"mrl train configs/{name}.yaml" in text and f"mrl train configs/{name}.yaml" in page
