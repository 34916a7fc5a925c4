"""Distillation in a real run: the policy approaches its teacher, with and without rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.observe.metrics_log import read
from mrl.prepare import new_model
from tests.launch.command import run
from tests.launch.tiny_runs import words

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def teacher(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    new = NewModelSection(hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, expert_size=64)
    section = ModelSection(path=str(folder), new=new, max_length=32)
    new_model.ensure_model(section, [str(task / "train.jsonl")], seed=1)
    return folder


def test_a_policy_comes_nearer_to_its_teacher(task, teacher, tmp_path) -> None:
    """Two ranks, two engines, a weight sync per step; rewards are measured but teach nothing."""
    run(
        "train",
        *words(task, tmp_path, "run"),
        f"algorithm.distillation={{teachers: {{default: {teacher}}}, teachers_only: true}}",
        f"reward.path={Path(__file__).parent}/rewards.py:always_right",
        "loop.steps=6",
        "loop.prompts_per_step=32",
        "training.optimizer={lr: 2e-3, warmup_steps: 0}",
        "loop.validation={every_steps: 0, before_training: false, after_training: false}",
        "loop.checkpoint={every_steps: 0, at_end: false}",
        log=tmp_path / "log",
        seconds=300,
    )
    rows = read(tmp_path / "run/metrics.jsonl")
    divergences = [row["distillation/divergence"] for row in rows]
    assert all(row["distillation/taught_frac"] == 1 for row in rows)
    assert all("distillation/loss" in row for row in rows)
    assert all(row["reward/raw_mean"] == 1 for row in rows), "nothing but the teacher can have moved it"
    assert divergences[-1] < 0.75 * divergences[0]
