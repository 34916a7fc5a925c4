"""`mrl train` from a folder of float8 weights as published, with engines that serve float8 and with engines that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.sections.model import NewModelSection
from mrl.observe.metrics_log import read
from tests.launch.command import run
from tests.launch.tiny_runs import words
from tests.published import publish, publish_task

pytestmark = pytest.mark.integration

FORMS = {
    "none": (
        "rollout.dtype=float32",
    ),  # the words' own limit of 1e-4 holds: engines serve the trainer's weights
    "fp8_block": (
        "rollout.dtype=bfloat16",
        "algorithm.correction.kind=truncated",
        "loop.max_rollout_mismatch=null",
    ),
}


@pytest.fixture(scope="module")
def published(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task's folder with a model wide enough for whole blocks, in float8."""
    folder = tmp_path_factory.mktemp("float8")
    new = NewModelSection(num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32)
    publish_task(task, folder, new, publish)
    return folder / "task"


@pytest.mark.parametrize("form", FORMS)
def test_published_float8_weights_are_trained_and_served(form: str, published: Path, tmp_path: Path) -> None:
    more = ("loop.steps=2", f"rollout.quantization={form}", *FORMS[form])
    run("train", *words(published, tmp_path, form, *more), log=tmp_path / "log")
    rows = read(tmp_path / form / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["optim/grad_norm"] > 0 for row in rows[1:])
    exact = form == "none"
    assert all((row["policy/rollout_difference_max"] < 1e-4) == exact for row in rows[1:])
    assert all(row["policy/rollout_mismatch_kl"] < 0.05 for row in rows[1:])


def test_published_float8_delta_nets_are_evaluated_as_they_are(task: Path, tmp_path: Path) -> None:
    """in_proj_ba and the filters are wide beside in_proj_qkvz: vLLM is told so."""
    new = NewModelSection(
        family="qwen3_next", num_layers=4, num_heads=2, num_kv_heads=2, head_dim=128, expert_size=128
    )
    publish_task(task, tmp_path, new, publish)
    bfloat16 = ("rollout.dtype=bfloat16", "loop.validation={num_prompts: 16}")
    output = run("eval", *words(tmp_path / "task", tmp_path, "eval", *bfloat16), log=tmp_path / "log")
    assert "val/reward" in output
