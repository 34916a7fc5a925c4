"""`mrl train` from published float8 weights, with float8 engines and with others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.observe.metrics_log import read
from mrl.prepare import new_model
from tests.launch.command import run
from tests.launch.tiny_runs import words
from tests.published import publish
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

FORMS = {
    "none": ("rollout.dtype=float32",),  # engines serve the trainer's weights: the limit of 1e-4 is kept
    "fp8_block": (
        "rollout.dtype=bfloat16",
        "algorithm.correction.kind=truncated",
        "loop.max_rollout_mismatch=null",
    ),
}


@pytest.fixture(scope="module")
def published(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the task's folder with a float8 model that is wide enough for whole blocks."""
    folder = tmp_path_factory.mktemp("float8")
    new = NewModelSection(num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32)
    model = ModelSection(path=str(folder / "source"), new=new, max_length=32)
    new_model.ensure_model(model, [str(task / "train.jsonl")], seed=0)
    return publish_task(task, folder)


def publish_task(task: Path, folder: Path) -> Path:
    """Write a folder with the task's rows and the model of `folder/source` in float8."""
    (folder / "task").mkdir()
    for file in ("train.jsonl", "validation.jsonl"):
        (folder / "task" / file).symlink_to(task / file)
    publish(folder / "source", folder / "task" / "model", folder / "wide")
    return folder / "task"


@pytest.mark.parametrize("form", FORMS)
def test_published_float8_weights_are_trained_and_served(form: str, published: Path, tmp_path: Path) -> None:
    settings = ("loop.steps=2", f"rollout.quantization={form}", *FORMS[form])
    run("train", *words(published, tmp_path, form, *settings), log=tmp_path / "log")
    rows = read(tmp_path / form / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["optim/grad_norm"] > 0 for row in rows[1:])
    exact = form == "none"
    assert all((row["policy/rollout_difference_max"] < 1e-4) == exact for row in rows[1:])
    assert all(row["policy/rollout_mismatch_kl"] < 0.05 for row in rows[1:])


def test_published_float8_delta_nets_are_evaluated_as_they_are(task: Path, tmp_path: Path) -> None:
    """in_proj_ba and the filters stay wide next to in_proj_qkvz, and vLLM's config says so."""
    widths = ("hidden_size", "head_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
    widths += ("linear_key_head_dim", "linear_value_head_dim")
    source = write_model(tmp_path / "source", "qwen3_next", **dict.fromkeys(widths, 128))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(task / "model" / name, source / name)
    bfloat16 = ("rollout.dtype=bfloat16", "loop.validation={num_prompts: 16}")
    published = publish_task(task, tmp_path)
    output = run("eval", *words(published, tmp_path, "eval", *bfloat16), log=tmp_path / "log")
    assert "val/reward" in output
